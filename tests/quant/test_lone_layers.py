"""Layers alone between float steps that would be slower in int8: which stay float, and who says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.fusion.lone_layers import FEWEST_PRODUCTS
from quant.ops.conv import Conv, ConvTranspose
from quant.ops.linear import Linear
from quant.static.runner import runners
from quant.variants import Calibrated


class Headed(nn.Module):
    """Integer layers, a float step, and a layer with a single output behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x).cumsum(dim=1))
        return found


class Twice(nn.Module):
    """A layer that stands alone in one call, and reads integers in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 64), nn.Linear(64, 1)
        self.second = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.head(self.first(x).relu()), self.head(self.second(x).cumsum(dim=1))), dim=1)


class Functional(Headed):
    """The same layers, all called by functions of the module itself."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.body[0], self.body[2]
        hidden = nn.functional.linear(x, first.weight, first.bias).relu()
        hidden = nn.functional.linear(hidden, second.weight, second.bias).cumsum(dim=1)
        return nn.functional.linear(hidden, self.head.weight, self.head.bias)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def batches() -> list[Tensor]:
    return [torch.randn(8, 16) for _ in range(3)]


def static(model: nn.Module, batches: list[Tensor], recipe: quant.Recipe | None = None) -> nn.Module:
    return quant.quantize_static(model.eval(), batches, recipe, progress=False)


def outcomes(model: nn.Module) -> dict[str, str]:
    return {entry.name: entry.outcome for entry in quant.summary(model)}


def test_a_layer_with_one_output_stays_float(batches: list[Tensor]) -> None:
    q = static(Headed(), batches)
    assert outcomes(q)["head"] == "float"
    assert outcomes(q)["body.0"] == outcomes(q)["body.2"] == "int8"
    assert type(q.head) is nn.Linear
    assert "float steps stand before and after it" in quant.summary(q)["head"].detail


@pytest.mark.parametrize("pattern", ["head", nn.Linear], ids=["by name", "by type"])
def test_a_rule_that_names_it_makes_it_int8(pattern: Any, batches: list[Tensor]) -> None:
    assert outcomes(static(Headed(), batches, quant.Recipe({pattern: quant.QConfig()})))["head"] == "int8"


class OwnLinear(nn.Module):
    """A linear layer written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(1, 64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.matrix)


def test_the_report_says_why_a_functional_layer_stays_float(batches: list[Tensor]) -> None:
    model = Headed()
    model.head = OwnLinear()  # type: ignore[assignment]
    entry = quant.summary(static(model, batches))["head"]
    assert entry.outcome == "float"
    assert "float steps stand before and after it" in entry.detail


def test_smoothing_does_not_ask_for_it() -> None:
    """Rows of all sizes, which 8 bits cannot hold: smoothing gives such a layer 16 bits, by a rule of its own."""
    model = Headed().eval()
    model.body, model.head = nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, 4)  # type: ignore[assignment]

    def batch() -> Tensor:
        return torch.randn(64, 64) * torch.exp(4 * torch.randn(64, 1))

    batches = [batch() for _ in range(16)]
    q = static(model, batches)
    assert "16-bit input" in quant.summary(q)["body.0"].detail
    assert outcomes(q)["head"] == "float"
    asked = quant.Recipe({"head": quant.QConfig()})
    assert "16-bit input" in quant.summary(static(model, batches, asked))["head"].detail
    rules = Calibrated(model, batches, "test", progress=False).recipe.rules
    assert [(rule.pattern, rule.asked) for rule in rules] == [("body.0", False)]


def test_a_default_names_no_layer(batches: list[Tensor]) -> None:
    recipe = quant.Recipe(default=quant.QConfig(weight_bits=7))
    assert outcomes(static(Headed(), batches, recipe))["head"] == "float"


@pytest.mark.parametrize("model", [nn.Linear(16, 1), nn.Sequential(nn.Linear(16, 1))], ids=["itself", "inside"])
def test_a_model_of_such_layers_alone_is_int8(model: nn.Module, batches: list[Tensor]) -> None:
    assert set(outcomes(static(model, batches)).values()) == {"int8"}


def test_a_layer_that_reads_integers_in_another_call_is_int8(batches: list[Tensor]) -> None:
    assert outcomes(static(Twice(), batches))["head"] == "int8"


def test_layers_of_one_forward_are_decided_together(batches: list[Tensor]) -> None:
    """A rule for functional layers is one for the module that calls them all."""
    assert outcomes(static(Functional(), batches))["head"] == "int8"


def test_training_knows_it_from_the_start(batches: list[Tensor]) -> None:
    prepared = quant.prepare_qat(Headed(), batches[0])
    assert "head" in runners(prepared)[""].fused.floats
    prepared(batches[0]).sum().backward()
    q = quant.convert(prepared.eval())
    assert outcomes(q)["head"] == "float"


def test_a_file_keeps_it(tmp_path: Path, batches: list[Tensor]) -> None:
    model = Headed()
    q = static(model, batches)
    quant.save(q, tmp_path / "q.safetensors")
    loaded = quant.load(tmp_path / "q.safetensors", model=model)
    assert type(loaded.head) is nn.Linear
    with torch.inference_mode():
        assert torch.equal(loaded(batches[0]), q(batches[0]))


def test_another_recipe_on_the_same_calibration_decides_anew(batches: list[Tensor]) -> None:
    """Without the first layer in integers, `head` stands alone in both of its calls."""
    model = Twice().eval()
    calibrated = Calibrated(model, batches, "test", progress=False)
    recipe = quant.Recipe({"first": None})
    assert outcomes(calibrated.converted(calibrated.recipe))["head"] == "int8"
    assert outcomes(calibrated.converted(recipe))["head"] == "float"
    assert outcomes(calibrated.converted(recipe)) == outcomes(static(model, batches, recipe))


LAYERS = {
    "Linear": nn.Linear(24, 5),
    "Conv1d": nn.Conv1d(6, 4, 3, padding=1),
    "Conv2d, stride": nn.Conv2d(6, 4, 3, stride=2, padding=1),
    "Conv2d, groups": nn.Conv2d(6, 12, 3, padding=1, groups=3),
    "ConvTranspose2d": nn.ConvTranspose2d(6, 4, 2, stride=2),
    "ConvTranspose2d, groups": nn.ConvTranspose2d(6, 12, 3, stride=3, groups=3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_products_are_counted_as_the_layer_makes_them(name: str) -> None:
    layer: Any = LAYERS[name]
    x = torch.ones(64, 24) if name == "Linear" else torch.ones(1, 6, *[96] * (layer.weight.dim() - 2))
    with torch.no_grad():
        layer.weight.fill_(1.0), layer.bias.zero_()
        y = layer(x)
    made = float(y.double().sum())  # of ones, a sum is as many as its products
    counted = _operator(layer).products_per_value(tuple(layer.weight.shape))
    assert counted == pytest.approx(made / (x.numel() + y.numel()), rel=0.03)  # less at the borders


def _operator(layer: Any) -> Any:
    if isinstance(layer, nn.Linear):
        return Linear()
    kind = ConvTranspose if layer.transposed else Conv
    return kind(stride=layer.stride, groups=layer.groups)


def test_the_limit_leaves_layers_that_gain() -> None:
    """What FEWEST_PRODUCTS is about: one output or input on one side of it, a square layer on the other."""
    assert Linear().products_per_value((1, 512)) < 1 < FEWEST_PRODUCTS < Linear().products_per_value((64, 64))
