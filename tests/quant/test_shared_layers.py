"""A layer that is called at several places: each call has its own input scale, or the layer is no static one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

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


class Called(nn.Module):
    """Calls one layer with inputs of two kinds, as a module or by a function: in one forward, or in two."""

    def __init__(self, kind: type[nn.Module], by: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8) if kind is nn.Linear else nn.Conv2d(6, 8, 3)
        self.out, self.by = nn.Linear(8, 4) if kind is nn.Linear else nn.Conv2d(8, 4, 1), by

    def call(self, x: Tensor) -> Tensor:
        if self.by == "module":
            y: Tensor = self.layer(x)
            return y
        function: Any = F.linear if isinstance(self.layer, nn.Linear) else F.conv2d
        called: Tensor = function(x, self.layer.weight, self.layer.bias)
        return called


class InOneForward(Called):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.out(torch.cat([self.call(x), self.call(y)]))
        return out


class InTwoForwards(Called):
    def forward(self, x: Tensor, moved: bool = False) -> Tensor:
        out: Tensor = self.out(self.call(torch.tanh(x) * 3 - 5 if moved else x))
        return out


MAKERS = (InOneForward, InTwoForwards)
BITS = quant.Recipe(default=QConfig(weight_bits=4))


def called(make: type[Called], kind: type[nn.Module], by: str, size: float = 1.0) -> tuple[Called, list[Any]]:
    """A model, and batches of both kinds of calls."""
    torch.manual_seed(0)
    model, batches = make(kind, by), list[Any]()
    for _ in range(8):
        x, y = (torch.randn(8, 6) if kind is nn.Linear else torch.randn(4, 6, 7, 7) for _ in range(2))
        both = make is InOneForward
        batches += [{"x": x * 0.3 + 2, "y": (y * 0.3 - 2) * size}] if both else [{"x": x + 2}, {"x": y, "moved": True}]
    return model, batches


def post_training(model: Called, batches: list[Any], rounding: str) -> tuple[nn.Module, nn.Module]:
    prepared = quant.prepare(model.eval(), batches[0], BITS, examples=batches[1:2])
    quant.calibrate.run(prepared, batches, progress=False)
    if rounding != "nearest":
        quant.learn_rounding(prepared, batches, rounding, steps=20, progress=False)
    return prepared, quant.convert(prepared)


def trained(model: Called, batches: list[Any], observer: str) -> tuple[nn.Module, nn.Module]:
    recipe = quant.Recipe(default=QConfig(weight_bits=4, weight_observer=observer))
    prepared = quant.prepare_qat(model, batches[0], recipe, examples=batches[1:2]).train()
    optimizer = torch.optim.SGD(prepared.parameters(), 0.01)
    for batch in batches:
        optimizer.zero_grad()
        (prepared(**batch) - 1).square().mean().backward()
        optimizer.step()
    return prepared.eval(), quant.convert(prepared)


HOW = {
    **{one: (post_training, one) for one in ("nearest", "gptq", "adaround")},
    **{one: (trained, one) for one in ("minmax", "lsq")},
}


@pytest.mark.filterwarnings("ignore::quant.types.CalibrationWarning")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d])
@pytest.mark.parametrize("make", MAKERS)
def test_calls_of_a_function_with_one_weight_are_those_of_a_module(
    make: type[Called], kind: type[nn.Module], how: str, tmp_path: Path
) -> None:
    convert, setting = HOW[how]
    outputs = []
    for by in ("module", "function"):
        model, batches = called(make, kind, by)
        prepared, q = convert(model, batches, setting)
        agreement = parity(prepared, q, batches)
        assert agreement.holds, agreement
        assert agreement.unequal == 0.0
        assert len({id(one) for one in q.modules() if isinstance(one, StaticLayer)}) == 2
        quant.save(q, tmp_path / by)
        loaded = quant.load(tmp_path / by, model=called(make, kind, by)[0], example_inputs=batches[0])
        outputs.append([q(**batch) for batch in batches])
        assert all(torch.equal(loaded(**batch), y) for batch, y in zip(batches, outputs[-1], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


def test_a_bias_fits_the_quietest_input_of_a_function() -> None:
    model, batches = called(InOneForward, nn.Linear, "function", size=1e-5)
    q = quant.quantize_static(model.eval(), batches, progress=False, smooth=False)
    with torch.no_grad():
        expected, got = model(**batches[0])[8:], q(**batches[0])[8:]
    assert error(expected, got) < 0.02


class Product(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Unlike(nn.Module):
    """Two calls with one weight, with other numbers folded in, or by owners that may have settings of their own."""

    def __init__(self, form: str) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(8, 6))
        self.one, self.other, self.form = Product(weight), Product(weight), form
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("small", torch.rand(8) + 0.1)
        self.register_buffer("large", torch.rand(8) + 5.0)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.one.weight
        if self.form == "factors":
            return self.out(F.linear(x, weight) * self.small), self.out(F.linear(x, weight) * self.large)
        if self.form == "norms":
            one = F.batch_norm(F.linear(x, weight), self.mean, self.small)  # type: ignore[arg-type]
            other = F.batch_norm(F.linear(x, weight), self.mean, self.large)  # type: ignore[arg-type]
            return self.out(one), self.out(other)
        return self.out(self.one(x)), self.out(self.other(x))


RULES = {"16 bits": {"other": QConfig(activation_bits=16)}, "4 bits": {"other": QConfig(weight_bits=4)}}


@pytest.mark.parametrize("form", ["factors", "norms", *RULES])
def test_calls_of_one_weight_with_other_folds_or_settings_are_layers_of_their_own(form: str) -> None:
    torch.manual_seed(0)
    model, x = Unlike(form).eval(), torch.randn(64, 6)
    prepared = quant.prepare(model, x, quant.Recipe(RULES.get(form, {})))
    prepared(x)
    q = quant.convert(prepared)
    agreement = parity(prepared, q, [x])
    assert agreement.holds, agreement
    with torch.no_grad():
        (one, other), (own, rounded) = model(x), q(x)
    assert error(one, own) < 0.03
    assert error(other, rounded) < (0.2 if form == "4 bits" else 0.03)
    assert sum(isinstance(layer, StaticLayer) for layer in q.modules()) == 3
