"""Comparisons: right numbers, worst first, and a cause that is the one that was put there."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from quant.compare import compare, parity
from quant.convert import convert
from quant.prepare import prepare
from quant.recipe import QConfig, Recipe

RECIPE = Recipe(default=QConfig(activation_observer="minmax"))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    ).eval()


def converted(model: nn.Module, data: Tensor) -> nn.Module:
    prepared = prepare(model, data, RECIPE)
    prepared(data)
    return convert(prepared)


def test_numbers_of_the_last_layer_are_those_of_the_model() -> None:
    model, x = network(), torch.randn(8, 3, 8, 8)
    q = converted(model, x)
    labels = torch.zeros(4)
    found = compare(model, q, [(x[:4], labels), x[4:]])
    assert [step.name for step in sorted(found, key=lambda step: step.name)] == ["0", "2", "5"]
    with torch.no_grad():
        a, b = model(x).double(), q(x).double()
    assert found["5"].sqnr == pytest.approx(
        float(10 * torch.log10(a.square().sum() / (a - b).square().sum())), abs=1e-3
    )
    assert found["5"].cosine == pytest.approx(float((a * b).sum() / a.norm() / b.norm()), abs=1e-6)
    values = [step.sqnr for step in found]
    assert values == sorted(values)
    assert json.loads(json.dumps(found.to_dict()))["steps"][0]["name"] == found.steps[0].name
    assert "SQNR dB" in str(found)
    with pytest.raises(KeyError, match="no step '9'"):
        found["9"]


def test_clipping_is_named() -> None:
    model, x = network(), torch.randn(8, 3, 8, 8)
    found = compare(model, converted(model, 0.05 * x), [x])
    assert "outside the range" in found["2"].cause
    assert found["2"].clipped > 0.01


def test_channels_that_share_a_scale_badly_are_named() -> None:
    model, x = network(), torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        model[0].weight[1:] *= 1e-3
        model[0].bias[1:] *= 1e-3
        model[2].weight[:, 1:] *= 1e3
    found = compare(model, converted(model, x), [x])
    assert found["2"].sqnr < 25
    model = nn.Sequential(model[0], model[2])
    found = compare(model, converted(model, x), [x])
    assert found["0"].clipped == 0


def test_layers_of_islands_are_compared_too() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.body = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.fc(x)) if x.abs().sum() > 0 else x

    torch.manual_seed(0)
    model, x = Branches().eval(), torch.randn(16, 8)
    found = compare(model, converted(model, x), [x])
    assert {step.name for step in found} == {"fc", "body.0", "body.2"}
    assert all(step.sqnr > 25 for step in found)


def test_models_that_do_not_fit_are_refused() -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    with pytest.raises(ValueError, match=r"expected a model from quant\.convert"):
        compare(model, model, [x])
    with pytest.raises(ValueError, match="no batch came"):
        compare(model, converted(model, x), [])
    with pytest.raises(ValueError, match="captured as a whole"):
        parity(model, model, x)
