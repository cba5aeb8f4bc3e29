"""`quant.sensitivity`: what one layer costs at the output is what a model with that layer alone in int8 loses."""

from __future__ import annotations

import contextlib
import json
import math
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quant.calibrate import CalibrationWarning, DataError
from quant.kernels.scheme import ACTIVATION_U8, QParams
from torch import Tensor, nn

import quant
from quant.metric import MetricError, MetricWarning, Score, score_of
from quant.sensitivity import Sensitivity, measure, sweep
from quant.sensitivity.output_error import OutputError
from quant.static.prepared import record_of
from quant.static.runner import rounding
from quant.variants import Calibrated

Model = Callable[[], nn.Module]


class Residual(nn.Module):
    """Two convolutions beside a third, with a norm folded and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = nn.ModuleDict({"one": nn.Conv2d(8, 8, 3, padding=1), "two": nn.Conv2d(8, 8, 1)})
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(self.block["one"](x)) + self.block["two"](x)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """An embedding and an LSTM, whose int8 forms have ranges of their own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12)
        self.lstm = nn.LSTM(12, 10, batch_first=True)
        self.head = nn.Linear(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(ids))[0])


class Island(nn.Module):
    """A forward that leaves torch in the middle, so that no one graph holds the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        return self.second(torch.tensor(y.tolist()) * 0.5)


def images(count: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 3, 8, 8) for _ in range(count)]


def words(count: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, 20, (4, 6)) for _ in range(count)]


def rows(count: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 6) for _ in range(count)]


CASES = [(Residual, images), (Recurrent, words), (Island, rows)]


def agreement(model: nn.Module, data: list[Tensor]) -> Callable[[nn.Module], float]:
    """A metric: minus the mean difference to the float model's outputs, which is 0 for that itself."""
    with torch.no_grad():
        expected = [model(batch) for batch in data]

    def evaluate(other: nn.Module) -> float:
        differences = [(other(batch) - one).abs().mean() for batch, one in zip(data, expected, strict=True)]
        return 1.0 - float(torch.stack(differences).mean())

    return evaluate


def sqnr(expected: list[Tensor], outputs: list[Tensor]) -> float:
    one, other = torch.cat(expected).double(), torch.cat(outputs).double()
    return 10 * math.log10(float(one.square().sum() / (one - other).square().sum()))


def built(kind: Model) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


@pytest.mark.parametrize(("kind", "make"), CASES, ids=["one graph", "dynamic and recurrent layers", "an island"])
def test_a_layers_cost_is_that_of_the_converted_model(kind: Model, make: Callable[[], list[Tensor]]) -> None:
    model, data = built(kind), make()
    evaluate = agreement(model, data)
    found = quant.sensitivity(model, data, evaluate, progress=False)
    with torch.no_grad():
        expected = [model(batch) for batch in data]
        for one in found:
            recipe = quant.Recipe({one.name: quant.QConfig()}, default=None)
            if one.kind == "Embedding":  # which has no range to calibrate
                alone = quant.quantize_dynamic(model, recipe)
            else:
                alone = quant.quantize_static(model, data, recipe, progress=False)
            assert one.only_int8_sqnr == pytest.approx(sqnr(expected, [alone(batch) for batch in data]), abs=0.05)
            assert one.only_int8_loss == pytest.approx(1.0 - evaluate(alone), rel=0.02, abs=1e-6)
            without = quant.quantize_static(model, data, quant.Recipe({one.name: None}), progress=False)
            assert one.only_float_sqnr == pytest.approx(sqnr(expected, [without(batch) for batch in data]), abs=0.3)
    assert {one.name for one in found} == {name for name, part in model.named_modules() if _has_weight(part)}
    assert [one.only_int8_sqnr for one in found] == sorted(one.only_int8_sqnr for one in found)


@pytest.fixture(autouse=True)
def _by_the_sweep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which way is cheaper is measured, and near a tie for models as small as these."""
    if "seconds" not in request.fixturenames:
        monkeypatch.setattr(measure._Forms, "_simulates", lambda self, seconds: True)


@pytest.mark.parametrize(("seconds", "simulates"), [(0.0, False), (1e6, True)])
def test_forms_are_built_where_that_is_cheaper(
    seconds: float, simulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what converting takes, and by what the sweep took for the outputs that were compared."""
    decide, chosen = measure._Forms._simulates, []

    def noted(self: measure._Forms, took: measure.Seconds) -> bool:
        assert took.converting > 0
        chosen.append(decide(self, measure.Seconds(seconds, took.floats)))
        return chosen[-1]

    monkeypatch.setattr(measure._Forms, "_simulates", noted)
    kind, make = CASES[0]
    model, data = built(kind), make()
    assert quant.sensitivity(model, data, agreement(model, data), progress=False).layers
    assert chosen == [simulates]


@pytest.mark.parametrize(("kind", "make"), CASES[:2], ids=["one graph", "dynamic and recurrent layers"])
def test_what_the_sweep_keeps_changes_no_bit(
    kind: Model, make: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded layers, recognised calls, rounding in one pass, and values let go, against each done where it is read."""
    model, data = built(kind), make()
    evaluate = agreement(model, data)
    kept = quant.sensitivity(model, data, evaluate, progress=False).to_dict()
    monkeypatch.setattr(sweep.Sweep, "_layer", lambda *_: None)
    monkeypatch.setattr(sweep.Sweep, "_spent", lambda _, steps: dict.fromkeys(steps, ()))
    monkeypatch.setattr(sweep, "recognised_calls", lambda *_: None)
    monkeypatch.setattr(sweep, "rounding", lambda qparams: lambda x: qparams.dequantize(qparams.quantize(x)))
    anew = quant.sensitivity(model, data, evaluate, progress=False).to_dict()
    assert {**kept, "seconds": 0.0} == {**anew, "seconds": 0.0}


@pytest.mark.parametrize("zero_point", [0, 117, 255])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rounding_is_quantising_and_dequantising_to_the_bit(zero_point: int, dtype: torch.dtype) -> None:
    qparams = QParams(torch.tensor(0.0234), torch.tensor(zero_point, dtype=torch.int32), ACTIVATION_U8)
    torch.manual_seed(0)
    ties = (torch.arange(-300, 300) + 0.5) * 0.0234
    special = torch.tensor([math.nan, math.inf, -math.inf, 1e38, -1e38, -1e-9, 0.0, -0.0])
    x = torch.cat([torch.randn(2000) * 4, ties, special]).to(dtype)
    expected, given = qparams.dequantize(qparams.quantize(x)), rounding(qparams)(x)
    assert torch.equal(given.view(torch.int32), expected.view(torch.int32))


def _has_weight(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv2d, nn.Linear, nn.LSTM, nn.Embedding))


@pytest.mark.parametrize(("kind", "make"), CASES[:2], ids=["one graph", "dynamic and recurrent layers"])
def test_the_sweep_gives_what_building_each_form_gives(
    kind: Model, make: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = built(kind), make()
    evaluate = agreement(model, data)
    swept = quant.sensitivity(model, data, evaluate, progress=False)
    monkeypatch.setattr(measure, "sweep_of", lambda *_: None)
    each = quant.sensitivity(model, data, evaluate, progress=False)
    assert [one.name for one in swept] == [one.name for one in each]
    for one, other in zip((*swept, *swept.groups), (*each, *each.groups), strict=True):
        assert one.only_int8_sqnr == pytest.approx(other.only_int8_sqnr, abs=0.05)
        assert one.only_float_sqnr == pytest.approx(other.only_float_sqnr, abs=0.3)
        assert one.only_float_gain == pytest.approx(other.only_float_gain, abs=2e-4)
    assert swept.evaluations - each.evaluations in (1, 2)  # the recorded one, and that of all layers if it is replayed


def test_the_model_runs_once_for_all_layers() -> None:
    model, data = built(Residual), images()
    calls: list[int] = []
    quantized = Calibrated(model, data, "test", progress=False)
    sweep = measure.sweep_of(quantized, {})
    assert sweep is not None
    whole = sweep.runner.simulated

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return whole(*args, **kwargs)

    sweep.runner.simulated = counted  # type: ignore[method-assign]
    with torch.no_grad():
        inputs = sweep.begin((data[0],), {})
        floats = sweep.values(inputs, sweep.floats)
        form = sweep.form(quantized.recipe_of_only(["head"]))
        output = sweep.again(floats, sweep.floats, form)
    assert len(calls) == 1
    assert not torch.equal(output, model(data[0]))


def test_values_that_no_later_step_reads_are_let_go() -> None:
    """At most four values of a chain of ten layers at a time: the layer's, its activation's, and those they read."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Chain(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for one in self:
                x = torch.relu(one(x))
            return x

    torch.manual_seed(0)
    model, data = Chain(*(nn.Linear(6, 6) for _ in range(10))).eval(), [torch.randn(16, 6) for _ in range(2)]
    quantized = Calibrated(model, data, "test", progress=False)
    found = measure.sweep_of(quantized, {})
    assert found is not None
    whole = found._computed

    def watched(*args: Any) -> Any:
        nonlocal most
        result = whole(*args)
        alive.extend(weakref.ref(one) for one in result.values())
        most = max(most, sum(one() is not None for one in alive))
        return result

    with torch.no_grad():
        floats = found.values(found.begin((data[0],), {}), found.floats)
        found._computed = watched  # type: ignore[method-assign]
        found.again(floats, found.floats, found.form(quantized.recipe_of_only(["0"])))
    assert len(alive) >= 10
    assert most <= 4


def test_a_model_that_is_a_layer() -> None:
    torch.manual_seed(0)
    found = quant.sensitivity(nn.Linear(6, 4), rows(), progress=False)
    assert [one.name for one in found] == [""]
    assert found.layers[0].only_int8_sqnr == pytest.approx(found.sqnr, abs=0.05)
    assert found.layers[0].only_float_sqnr == math.inf
    assert "(root)" in str(found)


def test_groups_are_the_modules_around_several_layers() -> None:
    found = quant.sensitivity(built(Residual), images(), progress=False)
    assert {one.name: set(one.layers) for one in found.groups} == {"block": {"block.one", "block.two"}}
    assert found["block"].kind == "group"


def test_what_a_float_layer_gains_has_an_error_from_paired_samples() -> None:
    torch.manual_seed(0)
    real, draws = torch.randn(50, 8), torch.randn(2, 200, 50, 8)
    gains, errors = [], []
    for first, second in zip(*draws, strict=True):
        whole, without = OutputError(), OutputError()
        for start in (0, 30):  # two calls
            part = slice(start, start + (30 if start == 0 else 20))
            whole.add(real[part], real[part] + first[part])
            without.add(real[part], real[part] + 0.5 * first[part] + 0.5 * second[part])
        assert len(whole.noises) == 50
        gain, error = without.gain_over(whole)
        assert gain == pytest.approx(without.sqnr - whole.sqnr)
        gains.append(gain)
        errors.append(error)
    assert np.mean(gains) == pytest.approx(10 * math.log10(2), abs=0.1)  # a half of the noise is left
    assert np.std(gains) == pytest.approx(np.mean(errors), rel=0.15)
    assert all(math.isnan(one) for one in OutputError().gain_over(whole))
    single, other = OutputError(), OutputError()
    single.add(real[:1], real[:1] * 1.01)
    other.add(real[:1], real[:1] * 1.02)
    assert math.isnan(single.gain_over(other)[1])


def test_a_layer_of_no_weight_gains_nothing_that_its_error_does_not_cover() -> None:
    found = quant.sensitivity(built(Residual), images(8), progress=False)
    for one in found:
        assert one.only_float_more == pytest.approx(one.only_float_sqnr - found.sqnr, abs=0.3)
        assert 0.0 < one.only_float_error < 3.0
    assert "more" in str(found)
    alone = quant.sensitivity(nn.Linear(6, 4), rows(), progress=False)
    assert math.isnan(alone.layers[0].only_float_more)  # nothing is left to be int8


def test_small_batches_are_compared_until_there_are_samples() -> None:
    torch.manual_seed(1)
    for size, count, kept in ((1, 20, 16), (3, 20, 6), (8, 20, 4), (1, 5, 5)):
        calibrated = Calibrated(built(Rows), [torch.randn(size, 6) for _ in range(count)], "test", progress=False)
        assert len(calibrated.kept) == len(calibrated.calls) == kept


def test_outputs_without_reals_are_said() -> None:
    found = quant.sensitivity(Calls(built(Rows), lambda y: y.argmax(1)), rows(), progress=False)
    assert "hold no reals, or zeros alone: give evaluate=" in str(found)
    assert "nan" not in str(found)
    assert "only int8" not in str(found)


def test_without_a_metric_there_are_decibels_and_nats(tmp_path: Path) -> None:
    found = quant.sensitivity(built(Residual), images(), progress=False)
    assert found.float_metric is None
    assert found.evaluations == 0
    assert all(one.only_int8_loss is None and one.only_int8_kl > 0 for one in found)
    text = str(found)
    assert all(one.name in text for one in found)
    assert "loss" not in text
    found.to_json(tmp_path / "found.json")
    read = json.loads((tmp_path / "found.json").read_text())
    assert [one["name"] for one in read["layers"]] == [one.name for one in found]
    found.plot(tmp_path / "found.svg")
    drawn = (tmp_path / "found.svg").read_text()
    assert drawn.startswith("<svg")
    assert all(one.name in drawn for one in found)
    with pytest.raises(ValueError, match=r"expected \.svg"):
        found.plot(tmp_path / "found.png")


def test_the_model_is_left_as_it_was() -> None:
    model = built(Residual).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quant.sensitivity(model, images(), agreement(built(Residual), images()), progress=False)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "forward" not in vars(model)
    assert not model._forward_hooks


def test_a_metric_whose_calls_follow_the_outputs_is_evaluated_on_each_form() -> None:
    model, data = built(Residual), images()
    expected = model(data[1] + model(data[0]).mean()).detach()

    def evaluate(other: nn.Module) -> float:
        return 1.0 - float((other(data[1] + other(data[0]).mean()) - expected).abs().mean())

    found = quant.sensitivity(model, data, evaluate, progress=False)
    alone = quant.quantize_static(model, data, quant.Recipe({"head": quant.QConfig()}, default=None), progress=False)
    with torch.no_grad():
        assert found["head"].only_int8_loss == pytest.approx(1.0 - evaluate(alone), rel=0.02)


class Rows(nn.Module):
    """Three layers in a row, on rows of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.layers(x)))


LONG = torch.randn(1000, 6, generator=torch.Generator().manual_seed(3))


def in_threads(model: nn.Module) -> Tensor:
    sizes = [700, 10, 200, 5, 70, 5, 5, 5]  # short calls end before the long ones that began earlier
    with ThreadPoolExecutor(4) as threads:
        return torch.cat(list(threads.map(model, LONG.split(sizes))))


def of_a_hook(model: nn.Module) -> Tensor:
    seen: list[Tensor] = []
    handle = model.get_submodule("head").register_forward_hook(lambda module, args, output: seen.append(output))
    output = model(LONG)
    handle.remove()
    return output + len(seen)


def of_layers(model: nn.Module) -> Tensor:
    return model(LONG) + model.get_submodule("head")(torch.ones(1, 16))


def under_autocast(model: nn.Module) -> Tensor:
    with torch.autocast("cpu"):
        return model(LONG).float()


def passing_over_errors(model: nn.Module) -> Tensor:
    output = model(LONG)
    if not torch.equal(output, built(Rows)(LONG)):
        with contextlib.suppress(Exception):
            return output + model(-LONG)
    return output


def of_one_value(model: nn.Module) -> Tensor:
    x = LONG.clone()
    if not torch.equal(model(x), built(Rows)(LONG)):
        x[666, 1] += 3.0  # none of the values that a fingerprint samples
    return model(x)[666]


@pytest.mark.parametrize(
    "outputs", [in_threads, of_a_hook, of_layers, under_autocast, passing_over_errors, of_one_value]
)
def test_a_metric_that_cannot_be_replayed_is_evaluated_on_each_form(
    outputs: Callable[[nn.Module], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = built(Rows), rows()
    with torch.no_grad():
        expected = outputs(model)

    def evaluate(other: nn.Module) -> float:
        return 1.0 - float((outputs(other) - expected).abs().mean())

    swept = quant.sensitivity(model, data, evaluate, progress=False)
    monkeypatch.setattr(measure, "sweep_of", lambda *_: None)
    each = quant.sensitivity(model, data, evaluate, progress=False)
    losses = {one.name: one.only_int8_loss for one in each}
    assert {one.name: one.only_int8_loss for one in swept} == pytest.approx(losses, rel=1e-4)


def run(evaluate: Any, data: Any = None) -> Sensitivity:
    return quant.sensitivity(built(Residual), images() if data is None else data, evaluate, progress=False)


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        (lambda model: "good", "returned a str, expected a number"),
        (lambda model: None, "returned None, expected a number"),
        (lambda model: [], "returned an empty list"),
        (lambda model: {"accuracy": 1.0}, "returned a dict"),
        (lambda model: float("nan"), "returned nan for the float model"),
        (lambda model: [math.inf, -math.inf], "returned nan for the float model"),
        (lambda model: (0.5, 0.9), "returned a tuple"),  # a loss and an accuracy have no mean
        (lambda model: np.array(["good"]), "returned a ndarray"),
        (lambda model: torch.tensor(1j), "returned a Tensor of torch.complex64"),
    ],
    ids=["a text", "None", "nothing", "a dict", "NaN", "infinities", "two metrics", "texts", "complex"],
)
def test_a_metric_that_is_no_number_is_an_error(evaluate: Any, message: str) -> None:
    with pytest.raises(MetricError, match=message):
        run(evaluate)


def test_a_metric_of_which_less_is_better_is_an_error() -> None:
    model, data = built(Residual), images()
    target = torch.cat([model(batch) for batch in data]).detach()

    def loss(other: nn.Module) -> Tensor:
        return (torch.cat([other(batch) for batch in data]) - target * 1.01).square().mean()

    with pytest.raises(MetricError, match="more must be better; of a loss or an error rate return its negative"):
        run(loss)


def test_a_metric_that_differs_from_call_to_call_is_said_once() -> None:
    model, data = built(Residual), images()
    chance = iter(range(1000))
    with pytest.warns(MetricWarning, match="for the same float model") as caught:
        found = run(lambda other: float(other(data[0]).abs().sum()) + next(chance) * 1e-3)
    assert len(caught) == 1
    assert found.noise == pytest.approx(1e-3, rel=0.1)
    assert model is not None


@pytest.mark.parametrize(
    "samples",
    [np.array([True, False]), [torch.tensor(1.0), torch.tensor(0)], [np.bool_(1), np.bool_(0)], [True, Fraction(0)]],
    ids=["an array", "tensors", "booleans of numpy", "numbers of all kinds"],
)
def test_scores_of_samples_are_of_any_numbers(samples: Any) -> None:
    assert score_of(samples, "test") == Score(0.5, (1.0, 0.0))


def test_a_metric_of_another_model_than_its_argument_is_said() -> None:
    model, data = built(Rows), rows()
    evaluate = agreement(model, data)
    with pytest.warns(MetricWarning, match="calls another model than its argument") as caught:
        quant.sensitivity(model, data, lambda other: evaluate(model), progress=False)
    assert caught[0].filename == __file__
    assert not model._forward_hooks


def test_masked_scores_and_outputs_without_reals() -> None:
    model, data = built(Rows), rows()
    masked = Calls(model, lambda y: y.masked_fill(torch.arange(4) > 2, -math.inf))
    found = quant.sensitivity(masked, data, progress=False)
    plain = quant.sensitivity(Calls(model, lambda y: y[:, :3]), data, progress=False)
    assert found.sqnr == pytest.approx(plain.sqnr, abs=0.3)
    assert found.kl == pytest.approx(plain.kl, rel=0.1)
    assert math.isnan(quant.sensitivity(Calls(model, lambda y: y.argmax(1)), data, progress=False).sqnr)


class Calls(nn.Module):
    """A model, and a function of its outputs."""

    def __init__(self, inner: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


def test_a_metric_that_does_not_use_the_outputs_is_said() -> None:
    with pytest.warns(MetricWarning, match="does not use what"):
        run(lambda model: 1.0)


def test_a_function_is_asked_for() -> None:
    with pytest.raises(TypeError, match="evaluate is a float, expected a function"):
        run(0.5)


def test_no_batches_one_batch_and_labels_alone() -> None:
    with pytest.raises(DataError, match="data is empty"):
        run(None, [])
    with pytest.warns(CalibrationWarning, match="has a single batch"):
        run(None, images(1))
    with pytest.raises(DataError, match=r"fails on the first batch, int64 \[4\].*not labels alone"):
        run(None, [torch.arange(4), torch.arange(4)])
    with pytest.raises(TypeError, match="put a single batch in a list"):
        run(None, images(1)[0])


def test_a_variant_is_what_its_recipe_gives() -> None:
    model, data = built(Residual), images()
    calibrated = Calibrated(model, data, "test", progress=False)
    wide = quant.QConfig(activation_bits=16)
    for recipe in (
        quant.Recipe({"block.one": None}),
        quant.Recipe({"block.*": wide, "head": None}),
        quant.Recipe(default=wide),
    ):
        expected = quant.quantize_static(model, data, recipe, progress=False)
        assert torch.equal(calibrated.converted(recipe)(data[0]), expected(data[0]))
    assert torch.equal(
        calibrated.converted(quant.Recipe())(data[0]), quant.quantize_static(model, data, progress=False)(data[0])
    )


def test_a_variant_is_smoothed_as_quantize_static_smooths() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)).eval()
    with torch.no_grad():
        model[0].weight[3] = 60.0
        model[1].weight[:, 3] /= 60.0
    data = [torch.randn(16, 32) for _ in range(4)]
    calibrated = Calibrated(model, data, "test", progress=False)
    assert record_of(calibrated.prepared).measured
    expected = quant.quantize_static(model, data, progress=False)
    assert torch.equal(calibrated.converted(calibrated.recipe)(data[0]), expected(data[0]))
    found = quant.sensitivity(model, data, progress=False)
    assert found["1"].kind == "Linear"


def test_batches_of_any_form_are_taken_with_forward() -> None:
    model, data = built(Residual), images()

    def twice(model: nn.Module, batch: Any) -> None:
        for half in batch["images"].split(2):
            model(half)

    plain = quant.sensitivity(model, [half for x in data for half in x.split(2)], progress=False)
    found = quant.sensitivity(model, [{"images": x} for x in data], forward=twice, progress=False)
    assert {one.name for one in found} == {one.name for one in plain}
    for one in found:
        other = next(line for line in plain if line.name == one.name)
        assert one.only_int8_sqnr == pytest.approx(other.only_int8_sqnr, abs=1.0)  # of all calls, not of the first four
    with pytest.raises(DataError, match=r"sensitivity: forward\(model, batch\) did not call model"):
        quant.sensitivity(model, data, forward=lambda model, batch: None, progress=False)
