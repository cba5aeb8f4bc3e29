"""Bias correction: the mean error that rounding weights makes is gone, through padding, strides and groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.convert import convert
from quant.prepare import prepare
from quant.static.runner import runners

COARSE = quant.QConfig(weight_bits=4)
PLAIN = quant.QConfig(weight_bits=4, bias_correction=False)

LAYERS = {
    "linear": (nn.Linear(24, 8), (24,)),
    "conv padded": (nn.Conv2d(6, 8, 5, padding=2), (6, 7, 7)),
    "depthwise strided": (nn.Conv2d(8, 8, 3, 2, padding=1, groups=8), (8, 9, 9)),
    "circular": (nn.Conv1d(6, 8, 3, padding=1, padding_mode="circular"), (6, 11)),
    "transposed": (nn.ConvTranspose2d(6, 8, 3, 2, padding=1, groups=2), (6, 5, 5)),
}


def converted(model: nn.Module, data: Tensor, qconfig: quant.QConfig) -> nn.Module:
    prepared = prepare(model, data, quant.Recipe(default=qconfig))
    prepared(data)
    return convert(prepared)


def shift(model: nn.Module, q: nn.Module, data: Tensor) -> float:
    """Root mean square over channels of the mean error."""
    with torch.no_grad():
        error = q(data) - model(data)
    return error.transpose(0, 1).flatten(1).mean(1).square().mean().sqrt().item()


@pytest.mark.parametrize("kind", LAYERS)
def test_takes_the_mean_error_away(kind: str) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[kind]
    data = torch.rand(64, *shape) + 0.5
    model = nn.Sequential(layer).eval()
    before = shift(model, converted(model, data, PLAIN), data)
    after = shift(model, converted(model, data, COARSE), data)
    # What is left: the input's own rounding, and means that differ from place to place.
    assert after < 0.15 * before


def test_square_error_on_the_calibration_data_is_no_larger() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)).eval()
    data = torch.rand(32, 3, 8, 8)
    with torch.no_grad():
        expected = model(data)
        plain, corrected = (
            (converted(model, data, q)(data) - expected).square().mean().item() for q in (PLAIN, COARSE)
        )
    assert corrected < 0.9 * plain


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.fc(x)) + 100)


def test_leaves_a_layer_alone_whose_calls_differ() -> None:
    torch.manual_seed(0)
    model, data = Twice().eval(), torch.randn(16, 8)
    prepared = prepare(model, data, quant.Recipe(default=COARSE))
    prepared(data)
    assert not runners(prepared)[""].means
    assert torch.equal(convert(prepared).fc.bias, model.fc.bias.detach())  # type: ignore[union-attr, arg-type]


def test_the_recipe_turns_it_off_by_layer() -> None:
    model, data = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval(), torch.randn(16, 8)
    prepared = prepare(model, data, quant.Recipe({"0": PLAIN}))
    assert list(runners(prepared)[""].means) == ["1"]
    prepared(data)
    q = convert(prepared)
    assert torch.equal(q[0].bias, model[0].bias.detach())  # type: ignore[index, union-attr, arg-type]
    assert not torch.equal(q[1].bias, model[1].bias.detach())  # type: ignore[index, union-attr, arg-type]


def test_simulation_corrects_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False)).eval()
    data = torch.rand(16, 3, 8, 8)
    prepared = prepare(model, data, quant.Recipe(default=COARSE))
    prepared(data)
    assert quant.parity(prepared, convert(prepared), [data]).holds


def test_a_layer_without_a_bias_keeps_zeros() -> None:
    """What is behind it may divide by their size, as a norm does: padding would become as large as what is real."""
    torch.manual_seed(0)
    norm = nn.RMSNorm(8, eps=1e-6)
    for layer in (nn.Linear(24, 8, bias=False), nn.utils.parametrizations.weight_norm(nn.Linear(24, 8, bias=False))):
        data = torch.rand(16, 24) + 0.5
        q = converted(nn.Sequential(layer, norm).eval(), data, quant.QConfig(weight_bits=4))
        assert q(torch.zeros(2, 24)).eq(0).all()


def test_what_folding_adds_is_corrected() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8)).eval()
    data = torch.rand(64, 6, 7, 7) + 0.5
    assert shift(model, converted(model, data, COARSE), data) < 0.15 * shift(model, converted(model, data, PLAIN), data)
