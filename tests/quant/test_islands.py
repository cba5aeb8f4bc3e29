"""Parts of a model that run as they are: what they are called with, and what the layers in them get."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)


class Around(nn.Module):
    """Hands what it is called with to the part, and has a layer behind it."""

    def __init__(self, part: nn.Module, hand: Callable[..., Any] = lambda *args: args) -> None:
        super().__init__()
        self.part, self.behind, self.hand = part, nn.Linear(16, 16), hand

    def forward(self, *args: Any) -> Tensor:
        out: Tensor = self.behind(self.part(*self.hand(*args)))
        return out


class Reads(Two):
    """Two tensors of an iterator."""

    def forward(self, pieces: Iterator[Tensor]) -> Tensor:
        out: Tensor = self.last(self.first(next(pieces)).relu() + self.first(next(pieces)))
        return out


class ReadsByValues(Reads):
    """The same, with a branch on values, which makes an island of it alone."""

    def forward(self, pieces: Iterator[Tensor]) -> Tensor:
        out = super().forward(pieces)
        return out if bool(out.isfinite().all()) else out * 2


class Writes(Two):
    """Writes its first argument, which may be its second one's memory."""

    def forward(self, x: Tensor, part: Tensor) -> Tensor:
        x.add_(0.5)
        out: Tensor = self.last(self.first(torch.cat([part, part], 1)).relu())
        return out


class Twice(nn.Module):
    """Hands memory that is shared to the second call of a part alone."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = Writes()

    def forward(self, x: Tensor, part: Tensor) -> Tensor:
        out: Tensor = self.writes(x.clone(), part) + self.writes(x, part)
        return out


def rows() -> Tensor:
    return torch.rand(64, 16) * 2 - 1


def noise(model: nn.Module, call: Callable[[], tuple[Any, ...]]) -> float:
    """Of the int8 model on inputs that calibration did not see, relative to the output."""
    torch.manual_seed(0)
    batches = (call() for _ in range(3))
    q = quant.quantize_static(model.eval(), batches, forward=lambda one, given: one(*given), progress=False)
    assert all(entry.outcome == "int8" for entry in quant.summary(q) if entry.type == "Linear")
    with torch.no_grad():
        torch.manual_seed(9)
        expected = model(*call())
        torch.manual_seed(9)
        return float((q(*call()) - expected).norm() / expected.norm())


PAIR: dict[str, Callable[[], nn.Module]] = {
    "of the caller's": lambda: Around(Reads()),
    "of the caller's, to an island": lambda: Around(ReadsByValues()),
    "of the forward's": lambda: Around(ReadsByValues(), lambda pieces: (iter([*pieces]),)),
}


@pytest.mark.parametrize("make", PAIR.values(), ids=PAIR)
def test_an_iterator_that_is_handed_on_is_read_anew_by_each_call(make: Callable[[], nn.Module]) -> None:
    """A call of the graph held the iterator of the recording, which was read to its end: StopIteration."""
    assert noise(make(), lambda: (iter([rows(), rows()]),)) < 0.1


def with_view() -> tuple[Tensor, Tensor]:
    x = rows()
    return x, x[:, :8]


SHARED: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "at the root": (Writes, with_view),
    "in another": (lambda: Around(Writes()), with_view),
    "in two others": (lambda: Around(Around(Writes())), with_view),
    "in the second call": (Twice, with_view),
}


@pytest.mark.parametrize(("make", "call"), SHARED.values(), ids=SHARED)
def test_a_write_is_seen_in_an_argument_over_the_same_memory(
    make: Callable[[], nn.Module], call: Callable[[], tuple[Tensor, ...]]
) -> None:
    """Captured with memories of their own, the part had a graph that no call was allowed to take: NotCalibrated."""
    assert noise(make(), call) < 0.1


WAITED: list[str] = []


class Threaded(Two):
    """Waits for a thread of its own, which ends without a word where its layer refuses a size."""

    def forward(self, x: Tensor) -> Tensor:
        done: queue.Queue[Tensor] = queue.Queue()
        thread = threading.Thread(target=lambda: done.put(self.first(x).relu()))
        thread.start()
        try:
            y = done.get(timeout=60)
        except queue.Empty:
            WAITED.append("in vain")
            raise
        finally:
            thread.join()
        out: Tensor = self.last(y)
        return out


def test_no_size_is_tried_on_a_part_that_waits_for_threads(seeded_on_one_thread: None) -> None:
    model, x = Around(Threaded()).eval(), torch.randn(4, 16)
    q = quant.quantize_static(model, [x], progress=False)
    assert not WAITED
    assert {entry.name: entry.outcome for entry in quant.summary(q)}["behind"] == "int8"
    with torch.no_grad():
        y = model(x)
        assert float((q(x) - y).norm() / y.norm()) < 0.1


class Casts(nn.Module):
    """Computes in bfloat16 by autocast: two layers, and a part with two more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
        self.part = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.computed(x)

    def computed(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(self.last(self.first(x).relu()))
        return out


class CastByADecorator(Casts):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return self.computed(x)


class CastsAPart(Casts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.first(x).relu())
        with torch.autocast("cpu", torch.bfloat16):
            y = self.part(x)
        return x + y.float()


CASTS = {Casts: {"first"}, CastByADecorator: {"first"}, CastsAPart: {"first", "last", "part.0"}}
"""Those whose layers get float32, which int8 layers take."""


@pytest.mark.parametrize("kind", CASTS)
@pytest.mark.parametrize("trained", [False, True])
def test_layers_under_autocast_are_captured_under_it(
    kind: type[Casts], trained: bool, seeded_on_one_thread: None, tmp_path: Path
) -> None:
    model, batches = kind().eval(), list(torch.randn(4, 8, 16))
    if trained:
        prepared = quant.prepare_qat(model, batches[0]).train()
        for batch in batches:
            prepared(batch).float().square().mean().backward()
        q = quant.convert(prepared.eval())
    else:
        q = quant.quantize_static(model, batches, progress=False)
    entries = {entry.name: entry for entry in quant.summary(q) if entry.name in dict(model.named_modules())}
    assert {name for name, entry in entries.items() if entry.outcome == "int8"} == CASTS[kind]
    assert entries["part.2"].detail == "its input is torch.bfloat16, expected torch.float32"
    with torch.no_grad():
        wanted, got = model(batches[0]), q(batches[0])
    assert got.dtype == wanted.dtype
    assert float((got - wanted).float().norm() / wanted.float().norm()) < 0.05
    quant.save(q, tmp_path / "casts.q8")
    loaded = quant.load(tmp_path / "casts.q8", model=kind(), example_inputs=batches[0])
    with torch.no_grad():
        assert torch.equal(loaded(batches[0]), got)
