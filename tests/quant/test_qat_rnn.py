"""Recurrent layers under training: gradients reach every weight, and eval mode is what convert gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quant.observers import _rounding, fake_quantize
from torch import Tensor, nn

from quant import convert, parity, prepare, prepare_qat
from quant.runtime.layers.recurrent import StaticRecurrent
from quant.static.simulation import simulating

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(5, 8)
        self.rnn = KINDS[kind](8, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.after = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.rnn(self.before(x))[0])
        return out


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_recurrent_layer_trains_and_converts_to_what_eval_showed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, target = torch.randn(6, 7, 5), torch.randn(6, 7, 3)
    prepared = prepare_qat(Net(kind), x).train()
    optimizer = torch.optim.Adam(prepared.parameters(), lr=0.01)
    losses = []
    for _ in range(12):
        loss = (prepared(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    gradients = [name for name, weight in prepared.named_parameters() if weight.grad is not None]
    assert {f"rnn.weight_hh_l{layer}{way}" for layer in (0, 1) for way in ("", "_reverse")} <= set(gradients)
    prepared.eval()
    with torch.no_grad():
        expected = prepared(x)
        with simulating(prepared):
            assert torch.equal(prepared(x), expected)
        converted = convert(prepared)
        assert isinstance(converted.rnn, StaticRecurrent)
        assert float((converted(x) - expected).norm() / expected.norm()) < 0.01
    agreement = parity(prepared, converted, [x])
    assert agreement.holds, agreement
    with torch.no_grad(), monkeypatch.context() as patch:  # half a step more is another arithmetic, and is seen
        patch.setattr(fake_quantize, "round_trip", _half_a_step_off)
        assert not torch.equal(prepared(x), expected)


def _half_a_step_off(x: Tensor, scale: Tensor, *args: Any, **kwargs: Any) -> Any:
    shift = scale / 2 if scale.dim() == 0 else (scale / 2).reshape(-1, *[1] * (x.dim() - 1))
    return _rounding.round_trip(x + shift, scale, *args, **kwargs)


class Loop(nn.Module):
    """A cell whose states are its inputs too, and read by a layer."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.cell, self.after = nn.Linear(5, 8), kind(8, 8), nn.Linear(8, 3)  # type: ignore[call-arg, arg-type]

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x).tanh()
        outputs = []
        for _ in range(3):
            h = self.cell(h, h)
            outputs.append(self.after(h))
        return torch.stack(outputs)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.RNNCell])
def test_a_cell_carries_the_state_that_it_reads_too_unrounded(kind: type[nn.RNNCellBase]) -> None:
    x = torch.randn(16, 5)
    prepared = prepare_qat(Loop(kind), x).train()
    for _ in range(3):
        prepared(x)
    prepared.eval()
    with torch.no_grad():
        expected = prepared(x)
        assert float((convert(prepared)(x) - expected).norm() / expected.norm()) < 1e-5


class Steps(nn.Module):
    """A cell and a layer that a loop calls for each step of the input."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.after = kind(5, 8), nn.Linear(8, 3)  # type: ignore[call-arg, arg-type]

    def forward(self, x: Tensor) -> Tensor:
        state = h = x.new_zeros(x.shape[0], 8)
        carried = (h, state)
        outputs = []
        for step in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                carried = self.cell(x[:, step], carried)
                h = carried[0]
            else:
                h = self.cell(x[:, step], h)
            outputs.append(self.after(h))
        return torch.stack(outputs, 1)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("start", ["float", "with examples", "calibrated"])
def test_later_calls_may_have_more_steps(kind: type[nn.RNNCellBase], start: str) -> None:
    model = Steps(kind).eval()
    short, long = torch.randn(16, 3, 5), torch.randn(16, 5, 5)
    if start == "calibrated":
        calibrated = prepare(model, short)
        calibrated(short), calibrated(long)
        prepared = prepare_qat(calibrated)
    else:
        prepared = prepare_qat(model, short, examples=[long] if start == "with examples" else [])
    prepared.train()
    for x in (short, long, short):
        prepared(x).square().mean().backward()
    prepared.eval()
    with torch.no_grad():
        q = convert(prepared)
        for x in (short, long):
            expected = prepared(x)
            assert float((q(x) - expected).norm() / expected.norm()) < 1e-5
