"""Forwards that do something else in training or with gradients than in eval mode without them.

A layer that gets larger values in eval mode would clip them by its ranges from training.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest
import torch
from quant.calibrate import CalibrationWarning
from torch import Tensor, nn
from torch.nn import functional as F

import quant

OTHERWISE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "mode": lambda module, y: y if module.training else y * 2,
    "gradients": lambda module, y: y if torch.is_grad_enabled() else y * 2,
    "inside of a child": lambda module, y: y if next(module.children()).training else y + 3,
}
ALIKE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "smaller": lambda module, y: y if module.training else y * 0.7,
    "a mask": lambda module, y: y * torch.ones_like(y) if module.training else y,
    "dropout": lambda module, y: F.dropout(y, 0.2, module.training),
}


class Branches(nn.Module):
    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(16, 32), nn.Linear(32, 16), between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.between(self, self.first(x).relu()))
        return y


class Scales(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scales = nn.Linear(16, 32), Scales()
        self.weight = nn.Parameter(torch.randn(16, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.scales(self.first(x).relu()), self.weight)


def trained(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    # A moving average would clip what three batches bring.
    recipe = quant.Recipe(default=quant.QConfig(activation_observer="minmax"))
    prepared = quant.prepare_qat(model, torch.randn(64, 16), recipe)
    for _ in range(3):
        prepared.train()(torch.randn(64, 16)).sum().backward()
    return prepared.eval()


def noise(model: nn.Module, q: nn.Module) -> float:
    with torch.no_grad():
        x = torch.randn(64, 16)
        y = model.eval()(x)
        return float((q(x) - y).norm() / y.norm())


@pytest.mark.parametrize("between", OTHERWISE.values(), ids=OTHERWISE)
def test_a_layer_with_larger_values_in_eval_mode_stays_float_and_is_said(
    between: Callable[[nn.Module, Tensor], Tensor], seeded_on_one_thread: None
) -> None:
    model = Branches(between)
    with pytest.warns(CalibrationWarning, match=r"prepare_qat: last: .* so these layers stay float"):
        prepared = trained(model)
    assert noise(model, prepared) < 0.02
    q = quant.convert(prepared)
    assert noise(model, q) < 0.02
    outcomes = {entry.name: entry for entry in quant.summary(q)}
    assert outcomes["first"].outcome == "int8"
    assert outcomes["last"].outcome == "float"
    assert "larger values" in outcomes["last"].detail


@pytest.mark.parametrize("between", ALIKE.values(), ids=ALIKE)
def test_a_layer_whose_values_are_no_larger_is_int8(
    between: Callable[[nn.Module, Tensor], Tensor], seeded_on_one_thread: None
) -> None:
    model = Branches(between)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = quant.convert(trained(model))
    assert {entry.name: entry.outcome for entry in quant.summary(q)}["last"] == "int8"
    assert noise(model, q) < 0.05


def test_what_lies_behind_a_child_that_goes_another_way_is_looked_at_too(seeded_on_one_thread: None) -> None:
    model = Outer()
    with pytest.warns(CalibrationWarning, match="so these layers stay float"):
        prepared = trained(model)
    assert noise(model, quant.convert(prepared)) < 0.02


class Heads(nn.Module):
    """Gives two values in training, and one in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = self.first(x).relu()
        return (self.last(y), y.mean()) if self.training else self.last(y)


class LastInEval(nn.Module):
    """Has a layer that only eval mode reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.behind = Heads(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        found = self.heads(x)
        return found[0] + found[1] if isinstance(found, tuple) else self.behind(found)


class Drops(nn.Module):
    """Leaves a layer out of half of training's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.maybe, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if not self.training or random.random() < 0.5:
            y = self.maybe(y)
        out: Tensor = self.last(y.tanh())
        return out


def test_a_layer_that_training_never_calls_stays_float_and_is_said(seeded_on_one_thread: None) -> None:
    """It had no ranges when it was called: NoDataSeen at the first call in eval mode."""
    model = LastInEval()
    with pytest.warns(CalibrationWarning, match=r"prepare_qat: behind: .*eval mode calls it and training does not"):
        prepared = trained(model)
    assert noise(model, prepared) < 0.03
    q = quant.convert(prepared)
    assert noise(model, q) < 0.03
    outcomes = {entry.name: entry for entry in quant.summary(q)}
    assert outcomes["heads.first"].outcome == outcomes["heads.last"].outcome == "int8"
    assert outcomes["behind"].outcome == "float"
    assert "training does not" in outcomes["behind"].detail


@pytest.mark.parametrize("seed", range(4))
def test_a_layer_that_training_leaves_out_by_chance_is_int8(seed: int, seeded_on_one_thread: None) -> None:
    random.seed(seed)
    state = random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        prepared = quant.prepare_qat(Drops(), torch.randn(64, 16))
    assert random.getstate() == state
    while prepared.get_parameter("maybe.weight").grad is None:
        prepared.train()(torch.randn(64, 16)).sum().backward()
    outcomes = {entry.name: entry.outcome for entry in quant.summary(quant.convert(prepared.eval()))}
    assert outcomes["maybe"] == "int8"


class AsksForGradients(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.last, self.factor = nn.Linear(16, 32), nn.Linear(32, 16), factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        if torch.is_grad_enabled():
            y = y * self.factor if self.factor != 1 else y
        out: Tensor = self.last(y)
        return out


class AsksInHelper(AsksForGradients):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.scaled(self.first(x).relu()))
        return out

    def scaled(self, y: Tensor) -> Tensor:
        return y * self.factor if torch.is_grad_enabled() else y


@pytest.mark.parametrize("kind", [AsksForGradients, AsksInHelper])
def test_a_static_model_asks_for_gradients_in_each_call_where_its_forward_goes_by_them(
    kind: type[AsksForGradients], seeded_on_one_thread: None
) -> None:
    model = kind(0.5).eval()
    x = torch.randn(64, 16)
    q = quant.quantize_static(model, [x], progress=False)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            y, found = model(x).detach(), q(x).detach()
        assert float((found - y).norm() / y.norm()) < 0.05
    assert "with gradients" in quant.summary(q).entries[0].detail


def test_a_forward_that_asks_for_gradients_and_does_the_same_is_one_graph(seeded_on_one_thread: None) -> None:
    q = quant.quantize_static(AsksForGradients(1).eval(), [torch.randn(64, 16)], progress=False)
    assert not any("island" in entry.detail for entry in quant.summary(q))


class Dropped(nn.Module):
    """A residual block whose branch training drops for some samples, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x)).relu()
        if self.training:
            y = y * torch.empty(len(x), 1, 1, 1).bernoulli_(0.5) / 0.5
        return x + y


def test_samples_dropped_by_chance_and_norms_that_know_no_batch_yet_keep_no_layer_float(
    seeded_on_one_thread: None,
) -> None:
    blocks = [Dropped() for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.Flatten(), nn.Linear(8 * 36, 4))
    for block in blocks:
        block.norm.running_var.fill_(0.05)  # as of smaller values than those of the batches
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        prepared = quant.prepare_qat(model, torch.randn(2, 3, 8, 8))
    for _ in range(30):
        prepared(torch.randn(2, 3, 8, 8))
    q = quant.convert(prepared.eval())
    outcomes = [entry.outcome for entry in quant.summary(q) if entry.type in ("Conv2d", "Linear")]
    assert outcomes == ["int8"] * 6, quant.summary(q)
