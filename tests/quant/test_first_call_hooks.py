"""Models that register hooks on their own modules in their first call, as transformers does for hidden states."""

from __future__ import annotations

import contextvars
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import quant
from quant.runtime.program_runner import ProgramRunner

COLLECTOR: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("collector", default=None)


def note(module: nn.Module, args: Any, output: Tensor) -> None:
    collected = COLLECTOR.get()
    if collected is not None:
        collected.append(output)


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.is_hooked = False

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if not self.is_hooked:
            for layer in self.layers:
                layer.register_forward_hook(note)
            self.is_hooked = True
        token = COLLECTOR.set([])
        try:
            for layer in self.layers:
                x = layer(x)
            return tuple(COLLECTOR.get() or [])
        finally:
            COLLECTOR.reset(token)


class Counts(Collects):
    """Counts its calls besides, which no later call repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        return super().forward(x)


def converted(model: nn.Module) -> nn.Module:
    return quant.quantize_static(model.eval(), [torch.randn(16, 8) for _ in range(4)], progress=False)


def test_the_model_is_one_program_that_gives_what_hooks_collect() -> None:
    torch.manual_seed(0)
    model = Collects()
    q = converted(model)
    assert not model.is_hooked
    assert not any(layer._forward_hooks for layer in model.layers)
    [runner] = (one for one in q.modules() if isinstance(one, ProgramRunner))
    assert runner.root is q
    x = torch.randn(16, 8)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = q(x)
        expected = model(x)
    assert len(outputs) == len(expected) == 2
    for one, other in zip(outputs, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.05


def test_another_number_of_dimensions_runs_the_models_own_forward_with_its_hooks() -> None:
    torch.manual_seed(0)
    model = Collects()
    q = converted(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs, expected = q(torch.ones(2, 3, 8)), model(torch.ones(2, 3, 8))
    assert len(outputs) == 2
    assert float((outputs[1] - expected[1]).norm() / expected[1].norm()) < 0.1


def test_a_first_call_that_changes_more_leaves_nothing_behind() -> None:
    model = Counts()
    q = converted(model)
    with torch.no_grad():
        q(torch.randn(16, 8))
    assert model.calls == 0
    assert q.calls == 1
