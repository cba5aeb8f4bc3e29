"""Script modules inside of a model: what they write in a capture and in calibration is put back, and runs in int8."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

import quant

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Memory(nn.Module):
    """Writes a buffer anew, another in place, a number, a list, and a buffer of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(16))
        self.register_buffer("calls", torch.zeros(1))
        self.steps, self.seen = 0, [torch.zeros(1)]
        self.inner = Counting()

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.state * 0.5 + x.mean(0)
        self.calls.add_(1.0)
        self.steps += 1
        self.seen.append(x.max().reshape(1))
        return self.inner(x) + self.state


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * 2


class Model(nn.Module):
    """Layers around a script module."""

    def __init__(self, memory: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.memory, self.last = nn.Linear(16, 16), memory, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.memory(self.first(x)).relu())


def scripted() -> nn.Module:
    made = torch.jit.script(Memory())
    loaded: nn.Module = torch.jit.load(io.BytesIO(made.save_to_buffer()))
    return loaded


def portrait(memory: nn.Module) -> tuple[object, ...]:
    return (memory.state.sum().item(), memory.calls.item(), memory.steps, len(memory.seen), memory.inner.count.item())


def test_a_capture_leaves_nothing_in_a_script_module() -> None:
    model, x = Model(scripted()).eval(), torch.randn(4, 16)
    model(x)
    before = portrait(model.memory)
    prepared = quant.prepare(model, x, examples=[x[:2]])
    assert portrait(model.memory) == portrait(prepared.memory) == before


def test_calibration_leaves_nothing_and_calls_go_on_from_there() -> None:
    model, batches = Model(scripted()).eval(), [torch.randn(4, 16) for _ in range(8)]
    q = quant.quantize_static(model, batches, progress=False)
    assert portrait(q.memory) == portrait(model.memory) == (0.0, 0.0, 0, 1, 0.0)
    with torch.no_grad():
        for batch in batches[:3]:
            expected = model(batch)
            assert (q(batch) - expected).norm() < 0.05 * expected.norm()
    assert portrait(q.memory)[1:] == (3.0, 3, 4, 3.0)


def test_a_traced_module_counts_as_it_did() -> None:
    traced = torch.jit.trace(Counting(), torch.randn(4, 16))
    before = traced.count.item()
    model = Model(traced).eval()
    prepared = quant.prepare(model, torch.randn(4, 16))
    assert prepared.memory.count.item() == before
