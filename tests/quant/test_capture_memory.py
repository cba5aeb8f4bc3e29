"""What a capture holds: a recording keeps no activation longer than the forward does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import quant
from quant.capture.outer_objects import Outside
from quant.capture.recorder import Recorder
from quant.capture.snapshot import Snapshot
from quant.graph import Kind, Node
from quant.runtime.trees import Ref

LENGTH = 40


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for _ in range(LENGTH):
            x = x.cos()
        return x


class Alive(TorchFunctionMode):
    """Counts the results of `cos` that are alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        if func is Tensor.cos:
            self.seen.append(weakref.ref(value))
            self.most = max(self.most, sum(one() is not None for one in self.seen))
        return value


def test_a_recording_holds_what_the_forward_holds() -> None:
    with Alive() as alive:
        quant.prepare(Chain().eval(), (torch.randn(2, 8),))
    assert len(alive.seen) >= 3 * LENGTH  # two recordings, and the graph's own run
    assert alive.most < LENGTH / 4


def test_another_tensor_may_have_the_identity_of_one_that_is_gone() -> None:
    model = Chain()
    recorder = Recorder(model, "", {}, (), Snapshot(model, Outside()))
    x = torch.zeros(1)
    recorder.append(Node(0, Kind.INPUT, "x"), x, 0)
    recorder.know(x, Ref(0))
    [identity] = recorder.where
    assert recorder.value(0) is x
    del x
    assert identity not in recorder.where
    assert recorder.value(0) is None


def test_a_snapshot_lets_go_of_what_the_model_no_longer_holds() -> None:
    model = nn.Linear(2, 2)
    model.cache = [torch.zeros(3)]
    kept = weakref.ref(model.cache[0])
    last = Snapshot(model, Outside())
    model.cache = []
    for _ in range(2):
        last = Snapshot(model, Outside(), last)
    assert kept() is None
