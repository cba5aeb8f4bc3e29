"""`kernels.autotune`: who is measured, what wins, and what is left alone. Time is the test's own."""

from __future__ import annotations

import pytest
import torch
from quant.kernels import BackendUnavailable, autotune
from torch import Tensor, nn


class Clock:
    """Time that passes only in layers."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Layer(nn.Module):
    """Takes the milliseconds that `costs` gives for its backend."""

    def __init__(self, clock: Clock, costs: dict[str | None, float]) -> None:
        super().__init__()
        self.backend: str | None = ""
        self.clock, self.costs, self.calls = clock, costs, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.clock.now += self.costs[self.backend] / 1000
        return x


class Fused(nn.Module):
    """Runs its parts without calling them."""

    def __init__(self, *parts: Layer) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part.forward(x)
        return x


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("default", "named", "chosen"),
    [(3.0, 1.5, "reference"), (1.0, 2.0, ""), (1.0, 0.99, "")],
    ids=["faster", "slower", "faster by less than it is worth"],
)
def test_the_fastest_backend_stays_in_the_layer(default: float, named: float, chosen: str) -> None:
    clock = Clock()
    layer = Layer(clock, {"": default, "reference": named})
    (tuned,) = autotune(nn.Sequential(layer), X, backends=["reference"], progress=False, clock=clock)
    assert (layer.backend, tuned.backend, tuned.name, tuned.shapes) == (chosen, chosen, "0", "2x3")
    assert tuned.seconds == pytest.approx({"": default / 1000, "reference": named / 1000})


def test_layers_are_tuned_apart_and_parts_of_one_call_together() -> None:
    clock = Clock()
    first, second = Layer(clock, {"": 1, "reference": 3}), Layer(clock, {"": 5, "reference": 2})
    alone = Layer(clock, {"": 1, "reference": 4})
    model = nn.ModuleDict({"fused": Fused(first, second), "alone": alone})
    model.forward = lambda x: model["alone"](model["fused"](x))  # type: ignore[method-assign]
    result = autotune(model, X, backends=["reference"], progress=False, clock=clock)
    assert [(one.name, one.parts) for one in result] == [("fused", 2), ("alone", 1)]
    assert (first.backend, second.backend, alone.backend) == ("reference", "reference", "")


def test_a_layer_is_measured_for_all_its_calls_and_shapes() -> None:
    clock = Clock()
    layer = Layer(clock, {"": 1, "reference": 1})
    model = nn.Module()
    model.layer = layer
    model.forward = lambda x: layer(layer(x))[:1] + layer(x[:1])  # type: ignore[method-assign]
    (tuned,) = autotune(model, (X,), backends=["reference"], progress=False, clock=clock)
    assert tuned.shapes == "2x3 x 2; 1x3"
    assert tuned.seconds[""] == pytest.approx(0.003)


def test_a_contender_far_behind_is_not_measured_again() -> None:
    clock = Clock()
    layer = Layer(clock, {"": 1, "reference": 1000})
    autotune(nn.Sequential(layer), X, backends=["reference"], progress=False, clock=clock)
    assert clock.now < 5  # a call that packs and three first ones; rounds would be fifteen more


def test_where_float_is_faster_the_result_gives_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    model = nn.Sequential(Layer(clock, {"": 2, "reference": 3}), Layer(clock, {"": 2, "reference": 3}))
    originals = nn.Sequential(Layer(clock, {"": 1}), Layer(clock, {"": 5}))
    result = autotune(model, X, float_model=originals, backends=["reference"], clock=clock)
    assert result.float_rules() == {"0": None}
    assert "quant.Recipe({'0': None})" in capsys.readouterr().out
    assert [layer.backend for layer in model] == ["", ""]


def test_what_the_example_does_not_reach_is_named_and_left() -> None:
    clock = Clock()
    model = nn.Module()
    model.used, model.unused = Layer(clock, {"": 2, "reference": 1}), Fused(Layer(clock, {}))
    model.unused.parts[0].backend = "mine"
    model.forward = lambda x: model.used(x)  # type: ignore[method-assign]
    result = autotune(model, X, backends=["reference"], progress=False, clock=clock)
    # Its nearest caller is the model: nothing tells a part that is not run from one that is run below Python.
    assert [(one.name, one.parts) for one in result] == [("used", 1), ("", 1)]


def test_a_failing_layer_gets_its_backend_back() -> None:
    class Broken(Layer):
        def forward(self, x: Tensor) -> Tensor:
            if self.calls:
                raise KeyError("broken")
            return super().forward(x)

    clock = Clock()
    layer = Broken(clock, {"mine": 1})
    layer.backend = "mine"
    with pytest.raises(KeyError):
        autotune(nn.Sequential(layer), X, backends=["reference"], progress=False, clock=clock)
    assert layer.backend == "mine"


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="Linear has no int8 layer to tune; quantise it first"):
        autotune(nn.Linear(3, 3), X, progress=False)
    with pytest.raises(BackendUnavailable, match="no backend is called 'fast'"):
        autotune(nn.Sequential(Layer(Clock(), {"": 1})), X, backends=["fast"], progress=False)
