"""A layer that several captured units call: each call has its own input scale, or the layer is no static one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.parity import parity
from quant.recipe import QConfig, RecipeError
from quant.runtime.layers.weighted import StaticLayer

LOUD = 100.0


class Block(nn.Module):
    def __init__(self, fc: nn.Module, *, norm: bool = False) -> None:
        super().__init__()
        self.fc, self.norm, self.out = fc, nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        out: Tensor = self.out(torch.relu(self.norm(y[0] if isinstance(y, tuple) else y)))
        return out


class Twice(nn.Module):
    """Captured in parts, as it branches on values; both call one layer, the second on a louder input."""

    def __init__(self, shared: nn.Module, form: str) -> None:
        super().__init__()
        if form == "alone-first":
            self.loud = shared
        self.one = Block(shared, norm=form == "norm")
        if form == "alone-last":
            self.loud = shared
        elif form != "alone-first":
            self.loud = Block(shared)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().sum() == 0:
            return x
        loud: Tensor = self.loud(LOUD * x)
        return self.one(x) + loud / LOUD


FORMS = ("blocks", "alone-first", "alone-last", "norm")


def made(form: str, shared: nn.Module | None = None) -> Twice:
    torch.manual_seed(0)
    model = Twice(shared or nn.Linear(8, 8), form)
    if isinstance(model.one.norm, nn.BatchNorm1d):
        model.one.norm.running_var.fill_(0.1)  # type: ignore[union-attr]
        model.one.norm.running_mean.fill_(0.3)  # type: ignore[union-attr]
    return model.eval()


def error(expected: Tensor, found: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("training", [False, True], ids=["ptq", "qat"])
@pytest.mark.parametrize("form", FORMS)
def test_each_call_has_its_own_input_scale(form: str, training: bool, tmp_path: Path) -> None:
    model, x = made(form), torch.randn(256, 8)
    prepared = quant.prepare_qat(model, x).train() if training else quant.prepare(model, x)
    for _ in range(50 if form == "norm" else 1):  # until training knows the batch norm's statistics
        prepared(x)
    converted = quant.convert(prepared.eval())
    with torch.no_grad():
        if not (training and form == "norm"):
            assert error(model(x), converted(x)) < 0.02
    agreement = parity(prepared, converted, [x])
    assert agreement.holds, agreement
    assert agreement.unequal < 0.01
    one, loud = converted.one.fc, converted.loud  # type: ignore[union-attr]
    loud = loud.fc if isinstance(loud, Block) else loud
    assert isinstance(one, StaticLayer)
    assert isinstance(loud, StaticLayer)
    assert (one is loud) == (form != "norm")
    assert {line.outcome for line in quant.summary(converted) if line.type == "Linear"} == {"int8"}
    quant.save(converted, tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=made(form), example_inputs=x)
    assert torch.equal(loaded(x), converted(x))


@pytest.mark.parametrize("form", ["blocks", "alone-first", "alone-last"])
def test_a_bias_is_not_corrected_by_the_mean_of_one_call(form: str) -> None:
    model, x = made(form), torch.randn(256, 8) + 3.0
    prepared = quant.prepare(model, x)
    prepared(x)
    converted = quant.convert(prepared)
    layer: StaticLayer = converted.one.fc  # type: ignore[union-attr, assignment]
    assert layer.bias is not None
    assert torch.equal(layer.bias, model.one.fc.bias)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_with_two_ranges_becomes_dynamic_and_says_so(kind: type[nn.RNNBase], tmp_path: Path) -> None:
    model, x = made("blocks", kind(8, 8, batch_first=True)), torch.randn(32, 5, 8)
    prepared = quant.prepare(model, x)
    prepared(x)
    converted = quant.convert(prepared)
    with torch.no_grad():
        assert error(model(x), converted(x)) < 0.02
    assert converted.one.fc is converted.loud.fc  # type: ignore[union-attr]
    entry = quant.summary(converted)["one.fc"]
    assert entry.outcome == "int8"
    assert entry.detail.startswith(
        "loud.fc and one.fc are one layer, captured apart, with ranges of their own, so dynamic"
    )
    assert quant.summary(converted)["loud.fc"].detail == "the same layer as one.fc"
    quant.save(converted, tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=made("blocks", kind(8, 8, batch_first=True)), example_inputs=x)
    assert torch.equal(loaded(x), converted(x))


def test_a_weight_that_would_learn_two_scales_is_refused() -> None:
    recipe = quant.Recipe(default=QConfig(weight_observer="lsq"))
    with pytest.raises(RecipeError, match=r"layer 'loud\.fc' is 'one\.fc' too.*one weight"):
        quant.prepare_qat(made("blocks"), torch.randn(4, 8), recipe)


class ReadBeside(nn.Module):
    """Calls a layer, and computes with its weight and bias by a function as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(F.linear(x, self.first.weight, self.first.bias).relu() + self.first(x))
        return y


@pytest.mark.parametrize("rules", [{}, {"first": None}], ids=["int8", "left float"])
def test_a_layer_whose_weight_and_bias_are_read_beside_it_keeps_them(rules: dict[str, None], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = ReadBeside().eval(), [torch.rand(16, 16) * 2 - 1 for _ in range(4)]
    q = quant.quantize_static(model, batches, quant.Recipe(rules), progress=False)
    with torch.no_grad():
        expected, got = model(batches[0]), q(batches[0])
    error = float((expected - got).square().mean())
    assert 10 * math.log10(float(expected.square().mean()) / error) > 30
    quant.save(q, tmp_path / "model.octet")
    assert torch.equal(quant.load(tmp_path / "model.octet", model=ReadBeside())(batches[0]), q(batches[0]))
