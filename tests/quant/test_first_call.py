"""What a first call finds worked out: all that its inputs do not decide, and nothing that changed meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.runtime import program_runner, region


class LastState(nn.Module):
    """Steps that run by themselves around a native call."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(self.lstm(x)[0][:, -1]) * scale


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (cnn, (2, 3, 8, 8)),
    "lstm": (LastState, (2, 5, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    make, shape = MODELS[request.param]
    return make().eval(), torch.randn(shape)


def converted(model: nn.Module, x: Tensor) -> nn.Module:
    return quant.quantize_static(model, [x], progress=False)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is worked out from now on, by name."""
    found: list[str] = []

    def note(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def instead(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, instead)

    note(region, "_Members")
    note(region, "_Text")
    note(program_runner, "single_step")
    note(program_runner.QuickBinding, "_places")
    return found


def test_after_convert(case: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = case
    q = converted(model, x)
    found = counted(monkeypatch)
    first = q(x)
    assert found == []
    # A copy has modules of its own, and works all out when it is first called.
    assert torch.equal(copy.deepcopy(q)(x), first)
    assert found


def test_after_load(case: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, x = case
    q = converted(model, x)
    quant.save(q, tmp_path / "q")
    loaded = quant.load(tmp_path / "q", model=model)
    found = counted(monkeypatch)
    assert torch.equal(loaded(x), q(x))
    assert found == []


def test_other_forms_of_call_are_worked_out_when_they_come() -> None:
    model, x = LastState().eval(), torch.randn(2, 5, 8)
    q = converted(model, x)
    expected = q(x)
    assert torch.equal(q(x=x), expected)
    assert torch.equal(q(x, 1.0), expected)
    assert torch.equal(q(x, scale=1.0), expected)


def test_other_numbers_before_the_first_call() -> None:
    model, x = cnn().eval(), torch.randn(2, 3, 8, 8)
    q, expected = converted(model, x), converted(model, x)(x)
    state = {name: one.clone() for name, one in q.state_dict().items()}
    state["5.bias"] += 1
    q.load_state_dict(state)
    assert torch.allclose(q(x), expected + 1, atol=1e-3)


def test_another_module_before_the_first_call() -> None:
    model, x = cnn().eval(), torch.randn(2, 3, 8, 8)
    q, called = converted(model, x), []

    class Quieter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            called.append(x)
            return x / 2

    q[2] = Quieter()
    halved = q(x)
    assert len(called) == 1
    bias = q[5].bias
    assert torch.allclose(halved - bias, (converted(model, x)(x) - bias) / 2, atol=0.02)


def test_a_hook_before_the_first_call() -> None:
    make, shape = MODELS["encoder"]
    model, x = make().eval(), torch.randn(shape)
    q, seen = converted(model, x), []
    expected = q(x)
    q = converted(model, x)
    q.norm1.register_forward_hook(lambda module, args, output: seen.append(output))
    assert torch.allclose(q(x), expected, atol=1e-5)
    assert len(seen) == 1
