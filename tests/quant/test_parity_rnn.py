"""Parity of recurrent layers: every time step is compared from the integers' own state, and what is wrong is seen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant.kernels import QParams
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import quant
from quant.parity import Parity, parity
from quant.recipe import QConfig
from quant.runtime.layers.recurrent import StaticRecurrent
from quant.static.runner import rounding
from quant.step_parity import StepParity

from .recurrent_kinds import KINDS, every_kind

RECIPE = quant.Recipe(default=QConfig(activation_observer="minmax"))
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


class Given(nn.Module):
    """A recurrent layer that is called with states, on padded or packed sequences, with a Linear behind."""

    def __init__(self, kind: str, *, lengths: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = KINDS[kind](6, 8, **options)
        self.out = nn.Linear((self.rnn.proj_size or 8) * (2 if self.rnn.bidirectional else 1), 3)
        self.lengths = lengths

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Any]:
        state = (h, c) if self.rnn.mode == "LSTM" else h
        if self.lengths is None:
            y, end = self.rnn(x, state)
        else:
            packed = pack_padded_sequence(x, self.lengths, self.rnn.batch_first, enforce_sorted=False)
            y, end = self.rnn(packed, state)
            y = y.data
        return self.out(y), end


def states(model: Given, batch: int) -> tuple[Tensor, Tensor]:
    count = model.rnn.num_layers * (2 if model.rnn.bidirectional else 1)
    return torch.rand(count, batch, model.rnn.proj_size or 8) - 0.5, torch.randn(count, batch, 8)


def made(model: nn.Module, *args: Tensor) -> tuple[nn.Module, Any]:
    prepared = quant.prepare(model.eval(), args, RECIPE)
    with torch.no_grad():
        prepared(*args)
    return prepared, quant.convert(prepared)


def of(agreement: Parity, name: str) -> StepParity:
    return next(step for step in agreement if step.name == name)


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two-layers-two-ways": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "packed": {"lengths": torch.tensor([4, 9, 1, 6]), "num_layers": 2, "bidirectional": True},
    "packed-no-bias": {"lengths": torch.tensor([9, 9, 3, 2]), "batch_first": True, "bias": False},
}


@pytest.mark.parametrize("form", list(FORMS))
@every_kind
def test_every_time_step_of_every_layer_holds(kind: str, form: str) -> None:
    model = Given(kind, **FORMS[form])
    x = torch.randn(4, 9, 6) if model.rnn.batch_first else torch.randn(9, 4, 6)
    h, c = states(model, 4)
    prepared, converted = made(model, x, h, c)
    agreement = parity(prepared, converted, [(x, h, c), (0.7 * x, -h, c)])
    assert agreement.holds, agreement
    rows = 2 * (36 if model.lengths is None else int(model.lengths.sum()))
    width = (model.rnn.proj_size or 8) * (2 if model.rnn.bidirectional else 1)
    for layer in range(model.rnn.num_layers):
        assert of(agreement, f"rnn.h_l{layer}").values == rows * width
    assert of(agreement, f"rnn.h_l{model.rnn.num_layers - 1}").whole is not None
    assert "at a time step" in str(agreement)


@every_kind
def test_a_layer_alone_and_unbatched(kind: str) -> None:
    torch.manual_seed(1)
    layer, x = KINDS[kind](6, 8, num_layers=2), torch.randn(12, 6)
    prepared, converted = made(layer, x)
    assert isinstance(converted, StaticRecurrent)
    agreement = parity(prepared, converted, [x, 0.5 * x])
    assert agreement.holds, agreement
    assert {step.name for step in agreement} == {"(root).h_l0", "(root).h_l1"}


def test_feedback_of_rounding_is_no_disagreement() -> None:
    """Strong recurrent weights let a difference of one step grow; no single time step is wrong."""
    torch.manual_seed(0)
    layer, x = nn.RNN(4, 64, batch_first=True), torch.randn(512, 60, 4)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(4)
    agreement = parity(*made(nn.Sequential(layer), x), [x])
    [step] = agreement
    assert step.whole is not None
    assert step.whole > 20
    assert step.worst <= 1
    assert step.unequal < 1e-3
    assert agreement.holds


@every_kind
def test_rounding_that_is_off_by_half_a_step_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Given(kind)
    x, (h, c) = torch.randn(1, 4, 6), states(model, 4)
    prepared, converted = made(model, x, h, c)
    assert parity(prepared, converted, [(x, h, c)]).holds

    def half_a_step_off(qparams: QParams) -> Callable[[Tensor], Tensor]:
        right = rounding(qparams)
        return lambda values: right(values + qparams.scale / 2)

    monkeypatch.setattr(sys.modules[StepParity.__module__], "rounding", half_a_step_off)
    agreement = parity(prepared, converted, [(x, h, c)])
    assert not of(agreement, "rnn.h_l0").holds
    assert "before rounding" in str(agreement)


def _swap_gates(direction: Any) -> None:
    rows = len(direction.bias_ih) // 2
    direction.bias_ih.copy_(torch.cat([direction.bias_ih[rows:], direction.bias_ih[:rows]]))


def _wrong_scale(direction: Any) -> None:
    direction.scale_hh.mul_(1.02)


@pytest.mark.parametrize("broken", [_swap_gates, _wrong_scale])
@pytest.mark.parametrize("place", range(4), ids=["l0", "l0-reverse", "l1", "l1-reverse"])
@every_kind
def test_a_wrong_gate_or_weight_is_seen_at_one_time_step(kind: str, place: int, broken: Callable[[Any], None]) -> None:
    """In the layer that has it, and there alone."""
    model = Given(kind, num_layers=2, bidirectional=True)
    x, (h, c) = torch.randn(1, 4, 6), states(model, 4)
    prepared, converted = made(model, x, h, c)
    with torch.no_grad():
        broken(converted.rnn.directions[place])
    agreement = parity(prepared, converted, [(x, h, c)])
    assert not of(agreement, f"rnn.h_l{place // 2}").holds
    assert of(agreement, f"rnn.h_l{1 - place // 2}").holds


@pytest.mark.parametrize("name", ["state_scale", "state_zero_point"])
@every_kind
def test_a_wrong_range_of_the_states_is_seen_at_one_time_step(kind: str, name: str) -> None:
    model = Given(kind)
    x, (h, c) = torch.randn(1, 4, 6), states(model, 4)
    prepared, converted = made(model, x, h, c)
    state = dict(converted.state_dict())
    key = f"rnn.{name}"
    state[key] = state[key] * 1.03 if name == "state_scale" else state[key] + 3
    converted.load_state_dict(state)
    assert not of(parity(prepared, converted, [(x, h, c)]), "rnn.h_l0").holds


def test_a_call_that_is_not_its_time_steps_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Given("gru")
    x, (h, c) = torch.randn(9, 4, 6), states(model, 4)
    prepared, converted = made(model, x, h, c)
    right = StaticRecurrent.call

    def forgets_the_state(self: Any, direction: Any, layer: int, x: Tensor, sizes: Any, h: Tensor, *rest: Any) -> Any:
        return right(self, direction, layer, x, sizes, h if len(x) == 1 else torch.zeros_like(h), *rest)

    monkeypatch.setattr(StaticRecurrent, "call", forgets_the_state)
    assert not parity(prepared, converted, [(x, h, c)]).holds


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_compared_from_the_state_that_the_users_loop_gave(kind: Any) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for step in x.unbind(1):
                state = self.cell(step, state)
            return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]

    torch.manual_seed(2)
    x = torch.randn(5, 4, 6)
    prepared, converted = made(Loop(), x)
    assert parity(prepared, converted, [x]).holds
    with torch.no_grad():
        _swap_gates(converted.cell.direction)
    agreement = parity(prepared, converted, [x])
    assert [step.holds for step in agreement].count(False) == 4, agreement  # a line a call
