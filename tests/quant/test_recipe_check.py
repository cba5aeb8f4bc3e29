"""Observer settings reach the observers of every phase, and what a phase cannot use is refused by rule and layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from quant.observers import (
    FakeQuantize,
    FixedObserver,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageObserver,
    PACTFakeQuantize,
    PercentileObserver,
)
from torch import Tensor, nn

import quant
from quant import QConfig, Recipe, RecipeError
from quant.qat.fake_quantizers import JoinedObserver
from quant.static.description import DESCRIPTION
from quant.static.runner import runners

RANGE = QConfig(activation_observer="fixed", activation_options={"low": 0.0, "high": 6.0})
STATIC = Recipe(default=QConfig(activation_observer="minmax", bias_correction=False))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        out: Tensor = self.last(torch.relu(self.second(x)))
        return out


class Joined(nn.Module):
    """Two layers whose outputs share a range."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat((self.a(x), self.b(x)), 1))
        return out


class Tagger(nn.Module):
    """A layer that becomes dynamic, and one that is static."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(x))
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0])
        return out


TOKENS = torch.arange(9).reshape(3, 3)


def make(kind: type[nn.Module] = Net) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return kind().eval(), torch.randn(16, 6) * 3


def observers(prepared: nn.Module) -> dict[str, Any]:
    return dict(runners(prepared)[""].observers.items())


def test_options_reach_the_observers_of_calibration() -> None:
    model, x = make()
    qconfig = QConfig(activation_observer="percentile", activation_options={"percentile": 90.0, "bins": 512})
    prepared = quant.prepare(model, x, Recipe({"first": qconfig}))
    found = observers(prepared)
    assert isinstance(found["first"], PercentileObserver)
    assert (found["first"].percentile, found["first"].bins) == (90.0, 512)
    assert isinstance(found["second"], HistogramObserver)
    prepared(x)
    clipped = quant.prepare(model, x, Recipe({"first": QConfig(activation_observer="minmax")}))
    clipped(x)
    assert float(found["first"].qparams().scale) < float(observers(clipped)["first"].qparams().scale)


def test_options_reach_the_observers_of_training() -> None:
    model, x = make(Joined)
    qconfig = QConfig(activation_observer="moving_average", activation_options={"momentum": 0.25})
    found = [each.observer for each in observers(quant.prepare_qat(model, x, Recipe(default=qconfig))).values()]
    averages = [one for each in found for one in (each.members if isinstance(each, JoinedObserver) else [each])]
    assert len(averages) == 3  # of the input, and of both that share a range
    assert all(isinstance(one, MovingAverageObserver) and one.momentum == 0.25 for one in averages)
    qconfig = QConfig(activation_observer="pact", activation_options={"alpha": 4.5})
    found = list(observers(quant.prepare_qat(model, x, Recipe(default=qconfig))).values())
    assert all(isinstance(each, PACTFakeQuantize) and float(each.alpha.detach()) == 4.5 for each in found)


@pytest.mark.parametrize("per_channel", [True, False], ids=["per channel", "per tensor"])
def test_options_reach_the_observers_of_weights(per_channel: bool) -> None:
    model, x = make()

    def scale(observer: str, **options: float) -> Tensor:
        qconfig = QConfig(
            weight_observer=observer, weight_options=options, per_channel=per_channel, activation_observer="minmax"
        )
        converted: Any = quant.quantize_static(model, [x], Recipe(default=qconfig), progress=False)
        found: Tensor = converted.second.weight_scale
        return found

    widest = scale("minmax")
    assert bool((scale("percentile", percentile=60.0) < 0.95 * widest).all())
    assert torch.allclose(scale("percentile", percentile=100.0), widest, rtol=0.01)
    assert torch.allclose(scale("fixed", low=-2.54, high=2.54), torch.tensor(0.02))


def test_a_range_by_hand_is_that_of_what_the_layer_puts_out() -> None:
    model, x = make()
    prepared = quant.prepare(model, x, Recipe({"first": RANGE}))
    prepared(x)
    found = observers(prepared)
    assert isinstance(found["first"], FixedObserver)
    assert [float(end) for end in found["first"].range()] == [0.0, 6.0]
    assert isinstance(found["x_0"], HistogramObserver)  # what the layer reads is seen as ever
    assert float(found["x_0"].range()[1]) > 6.0
    quant.convert(prepared)
    trained = observers(quant.prepare_qat(model, x, Recipe({"first": RANGE})))
    assert isinstance(trained["first"], FakeQuantize)
    assert isinstance(trained["first"].observer, FixedObserver)
    assert float(trained["first"].qparams().scale) == pytest.approx(6 / 255)
    assert isinstance(trained["x_0"].observer, MovingAverageObserver)


@pytest.mark.parametrize("pattern", ["last", "relu*", nn.Identity], ids=["read in float", "no module", "no weights"])
def test_a_range_by_hand_that_has_no_place_is_refused(pattern: Any) -> None:
    model, x = make()
    model.add_module("unused", nn.Identity())
    with pytest.raises(RecipeError, match=r"quant\.prepare: rule .* asks for a range by hand, and|no module matches"):
        quant.prepare(model, x, Recipe({pattern: RANGE}))


def test_a_range_by_hand_for_every_layer_leaves_the_inputs_to_the_data() -> None:
    model, x = make()
    found = observers(quant.prepare(model, x, Recipe(default=RANGE)))
    assert [type(each) for each in found.values()] == [HistogramObserver, FixedObserver, FixedObserver]


def test_layers_that_share_a_range_must_agree_on_it() -> None:
    model, x = make(Joined)
    for rules in ({"a": RANGE}, {"b": RANGE}):
        with pytest.raises(RecipeError, match=r"quant\.prepare: 'a', 'b' share one range.*set_ranges\(prepared, \{'"):
            quant.prepare(model, x, Recipe(rules))
    quant.prepare(model, x, Recipe({"[ab]": RANGE}))


@pytest.mark.parametrize("per_row", [True, False])
def test_static_layers_have_no_ranges_per_row(per_row: bool) -> None:
    model, x = make()
    with pytest.raises(
        RecipeError, match=rf"rule 'second' -> .* asks for per_row={per_row}, and layer 'second' has st"
    ):
        quant.prepare(model, x, Recipe({"second": QConfig(per_row=per_row)}))
    with pytest.raises(RecipeError, match=r"quant\.prepare_qat: the recipe's default asks for per_row=.*layer 'first'"):
        quant.prepare_qat(model, x, Recipe(default=QConfig(per_row=per_row)))


def test_a_default_may_be_for_the_dynamic_layers_among_static_ones() -> None:
    prepared = quant.prepare(
        make(Tagger)[0], TOKENS, Recipe(default=QConfig(per_row=False, activation_observer="minmax"))
    )
    prepared(TOKENS)
    report = quant.summary(quant.convert(prepared))
    assert (report["words"].outcome, report["head"].outcome) == ("int8", "int8")
    for setting in ({"activation_observer": "minmax"}, {"weight_observer": "mse"}, {"activation_symmetric": True}):
        rule = {nn.Embedding: QConfig(**setting)}  # type: ignore[arg-type]
        with pytest.raises(RecipeError, match=rf"asks for {next(iter(setting))}=.*layer 'words' becomes dynamic"):
            quant.prepare(make(Tagger)[0], TOKENS, Recipe(rule))


@pytest.mark.parametrize("name", ["histogram", "percentile", "entropy", "mse"])
def test_training_refuses_an_observer_that_searches(name: str) -> None:
    model, x = make()
    recipe = Recipe({"first": QConfig(activation_observer=name)})
    with pytest.raises(
        RecipeError, match=rf"prepare_qat: rule 'first' -> .* activation_observer '{name}', which searches"
    ):
        quant.prepare_qat(model, x, recipe)
    prepared = quant.prepare(model, x, recipe)
    prepared(x)
    with pytest.raises(TypeError, match=r"quant\.prepare_qat: expected a quant\.Recipe, got dict"):
        quant.prepare_qat(prepared, recipe={})  # type: ignore[arg-type]
    trained = observers(quant.prepare_qat(prepared))["first"]
    assert isinstance(trained.observer, MovingAverageObserver)
    assert trained.qparams() == observers(prepared)["first"].qparams()


def test_auto_is_the_phase_s_own() -> None:
    model, x = make()
    assert {type(each) for each in observers(quant.prepare(model, x)).values()} == {HistogramObserver}
    assert {type(each.observer) for each in observers(quant.prepare_qat(model, x)).values()} == {MovingAverageObserver}
    asked = Recipe(default=QConfig(activation_observer="minmax"))
    assert {type(each.observer) for each in observers(quant.prepare_qat(model, x, asked)).values()} == {MinMaxObserver}


@pytest.mark.parametrize("setting", ["activation_observer", "weight_observer"])
def test_calibration_does_not_learn(setting: str) -> None:
    model, x = make()
    with pytest.raises(
        RecipeError, match=rf"the recipe's default asks for {setting} 'lsq', which is learned in training"
    ):
        quant.prepare(model, x, Recipe(default=QConfig(**{setting: "lsq"})))  # type: ignore[arg-type]


def test_scales_of_recurrent_weights_are_not_learned() -> None:
    model, _ = make(Recurrent)
    with pytest.raises(
        RecipeError, match=r"quant\.prepare_qat: layer 'rnn': weight_observer is 'lsq', and scales of rec"
    ):
        quant.prepare_qat(model, torch.randn(4, 2, 6), Recipe(default=QConfig(weight_observer="lsq")))
    rules = {"rnn": QConfig(), "head": QConfig(weight_observer="lsq")}
    quant.prepare_qat(model, torch.randn(4, 2, 6), Recipe(rules))


@pytest.mark.parametrize("kind", ["lsq", "pact"])
def test_what_was_trained_with_learned_ranges_is_loaded(kind: str, tmp_path: Path) -> None:
    model, x = make()
    prepared = quant.prepare_qat(model, x, Recipe(default=QConfig(activation_observer=kind))).train()
    prepared(x).sum().backward()
    converted = quant.convert(prepared)
    quant.save(converted, tmp_path / "m.q8")
    assert torch.equal(quant.load(tmp_path / "m.q8", model=model)(x), converted(x))


def test_descriptions_that_spell_out_the_old_defaults_are_loaded(tmp_path: Path) -> None:
    """Files from before "auto" say "histogram" and per_row=True, and say nothing of options."""
    model, x = make()
    converted = quant.quantize_static(model, [x], progress=False)
    for layer in converted.__dict__[DESCRIPTION]["layers"].values():
        layer.update(activation_observer="histogram", per_row=True)
        del layer["activation_options"], layer["weight_options"]
    quant.save(converted, tmp_path / "m.q8")
    assert torch.equal(quant.load(tmp_path / "m.q8", model=model)(x), converted(x))


def test_exported_ranges_convert_to_the_same_bits(tmp_path: Path) -> None:
    model, x = make()
    prepared = quant.prepare(model, x, STATIC)
    prepared(x)
    quant.calibrate.save_ranges(prepared, tmp_path / "ranges.json")
    other = quant.prepare(model, x, Recipe(default=QConfig(bias_correction=False)))
    quant.calibrate.load_ranges(other, tmp_path / "ranges.json")
    assert torch.equal(quant.convert(other)(x), quant.convert(prepared)(x))
    for name in observers(prepared):
        assert runners(other)[""].qparams(name) == runners(prepared)[""].qparams(name)


def test_a_given_input_range_is_what_converts() -> None:
    model, x = make()
    prepared = quant.prepare(model, x)
    quant.calibrate.set_ranges(prepared, {"x_0": (0.0, 1.0)})
    prepared(x)
    q = quant.convert(prepared)
    assert torch.equal(q(x.clamp(0, 1)), q(x))
    start = observers(quant.prepare_qat(prepared))["x_0"]
    assert float(start.qparams().scale) == pytest.approx(1 / 255)


def test_a_model_in_training_takes_no_ranges(tmp_path: Path) -> None:
    model, x = make()
    with pytest.raises(ValueError, match=r"calibrate\.load_ranges: the model is prepared for training"):
        quant.calibrate.load_ranges(quant.prepare_qat(model, x), tmp_path / "ranges.json")


PER_CALL = QConfig(activation_observer="dynamic")


def test_layers_of_a_static_model_are_dynamic_where_the_recipe_says_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    batches = [torch.randn(16, 32) for _ in range(3)]
    narrow = dataclasses.replace(PER_CALL, weight_bits=4, group_size=32)
    q = quant.quantize_static(model, batches, Recipe({"2": PER_CALL, "4": narrow}), progress=False)
    report = quant.summary(q)
    assert report["0"].detail.startswith("static linear")
    assert report["2"].detail.startswith("the recipe asks for ranges of each call, so dynamic: weights per channel")
    assert report["4"].outcome == "int4"
    only = quant.quantize_dynamic(model, Recipe({"2": PER_CALL, "4": narrow}, default=None))
    hidden = torch.relu(model[0](batches[0])).detach()
    assert torch.equal(q[2](hidden), only[2](hidden))  # type: ignore[operator, index]
    loud = batches[0] * torch.tensor([100.0] + [1.0] * 15)[:, None]  # of which static ranges know nothing
    first = quant.quantize_static(model, batches, Recipe({"0": PER_CALL}), progress=False)
    assert (first[0](loud) - model[0](loud)).norm() < 0.02 * model[0](loud).norm()  # type: ignore[operator, index]
    quant.save(q, tmp_path / "q.safetensors")
    assert torch.equal(quant.load(tmp_path / "q.safetensors", model=model)(batches[0]), q(batches[0]))
    worst = quant.compare(model, q, batches).steps[0]
    assert (worst.name, worst.rule) == ("4", "\"4\": quant.QConfig(activation_observer='dynamic')")  # without groups
    everything = quant.quantize_static(model, batches, Recipe(default=PER_CALL), progress=False)
    assert torch.equal(everything(batches[0]), quant.quantize_dynamic(model)(batches[0]))


def test_a_layer_without_a_dynamic_form_says_so_where_the_recipe_wants_one() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(self.conv(x).relu().mean((2, 3)))
            return y

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight)

    torch.manual_seed(0)
    model, batches = Net().eval(), [torch.randn(8, 3, 6, 6) for _ in range(3)]
    report = quant.summary(quant.quantize_static(model, batches, Recipe(default=PER_CALL), progress=False))
    assert report["conv"].detail == (
        "the recipe asks for ranges of each call, and a Conv2d has no dynamic form; without this setting it is static"
    )
    assert report["head"].outcome == "int8"
    with pytest.raises(quant.NothingQuantized, match="a functional linear has no dynamic form"):
        quant.prepare(Functional().eval(), torch.randn(2, 4), Recipe(default=PER_CALL))
    dynamic = quant.summary(quant.quantize_dynamic(model))
    assert dynamic["conv"].detail.startswith("Conv2d is not quantised dynamically; quant.quantize_static makes it int8")


class Branching(nn.Module):
    """A forward that reads values in Python, which calls its layers one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        found: torch.Tensor = self.second(y * 2 if float(y.sum()) > 1e9 else y)
        return found


@pytest.mark.parametrize(
    ("model", "name"),
    [(nn.Linear(32, 4), ""), (nn.LSTM(32, 8), ""), (Branching(), "first")],
    ids=["a linear layer itself", "a recurrent layer itself", "called by an island"],
)
def test_a_layer_that_is_captured_by_itself_is_dynamic_where_the_recipe_says_so(
    model: nn.Module, name: str, tmp_path: Path
) -> None:
    batches = [torch.randn(16, 32) for _ in range(3)]
    q = quant.quantize_static(model.eval(), batches, Recipe({name: PER_CALL}), progress=False)
    assert quant.summary(q)[name].outcome == "int8"
    assert quant.summary(q)[name].detail.startswith("the recipe asks for ranges of each call, so dynamic: ")
    layer = quant.quantize_dynamic(model.get_submodule(name))
    found, expected = q.get_submodule(name)(batches[0]), layer(batches[0])
    assert torch.equal(*((found, expected) if isinstance(found, torch.Tensor) else (found[0], expected[0])))
    quant.save(q, tmp_path / "q.safetensors")
    loaded = quant.load(tmp_path / "q.safetensors", model=model)
    assert quant.summary(loaded)[name].outcome == "int8"


def test_ranges_of_each_call_are_asked_for_where_they_exist() -> None:
    with pytest.raises(RecipeError, match=r"activation_observer is 'dynamic', which has no options, and .*'momentum'"):
        dataclasses.replace(PER_CALL, activation_options={"momentum": 0.1})
    model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.Flatten(), nn.Linear(12, 4))
    x = torch.randn(2, 3, 4)
    with pytest.raises(RecipeError, match=r"rule '0' -> .*'dynamic', and it decides no layer that has a dynamic form"):
        quant.prepare(model, x, Recipe({"0": PER_CALL}))
    with pytest.raises(RecipeError, match=r"prepare_qat: rule '2' -> .*'dynamic', and linear layers are trained with"):
        quant.prepare_qat(model, x, Recipe({"2": PER_CALL}))
    with pytest.raises(RecipeError, match="expected one of auto, dynamic, minmax"):
        QConfig(activation_observer="dynamics")
