"""Comparisons: right numbers, worst first, and a cause that is the one that was put there."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quant.calibrate import CalibrationWarning
from torch import Tensor, nn

from quant.artefact import load, save
from quant.compare import compare
from quant.convert import convert
from quant.dynamic import quantize_dynamic
from quant.parity import parity
from quant.prepare import prepare
from quant.qat import QATSchedule, prepare_qat
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
    assert [step.name for step in sorted(found, key=lambda step: step.name)] == ["0", "2", "5", "input_0"]
    with torch.no_grad():
        a, b = model(x).double(), q(x).double()
    assert found["5"].sqnr == pytest.approx(
        float(10 * torch.log10(a.square().sum() / (a - b).square().sum())), abs=1e-3
    )
    assert found["5"].cosine == pytest.approx(float((a * b).sum() / a.norm() / b.norm()), abs=1e-6)
    values = [step.own_sqnr for step in found]
    assert values == sorted(values)
    assert found.order == ("input_0", "0", "2", "5")
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["steps"][0]["name"] == found.steps[0].name
    assert "SQNR dB" in str(found)
    with pytest.raises(KeyError, match="no step '9'"):
        found["9"]


def test_what_a_step_adds_is_told_from_what_came_down_to_it() -> None:
    model, x = network(), torch.randn(8, 3, 8, 8)
    bad = Recipe({"2": QConfig(weight_bits=2)}, default=QConfig(activation_observer="minmax"))
    prepared = prepare(model, x, bad)
    prepared(x)
    found = compare(model, convert(prepared), [x])
    assert found.steps[0].name == "2"
    assert found["2"].cause == "rounding of the weights to 2 bits"
    assert found["2"].advice == "give its weights 8 bits"
    assert found["2"].rule == '"2": quant.QConfig()'
    assert found["5"].own_sqnr > 35 > 20 > found["5"].sqnr
    assert found["5"].cause == "error of the steps before"
    assert "own dB" in str(found)


def test_the_own_error_is_that_of_the_layer_alone() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8)).eval(), torch.randn(64, 8)
    q = converted(model, x)
    found = compare(model, q, [x])
    entered = found["input_0"]
    assert entered.kind == "quantize"
    rounded = q[0].input_scale * ((x / q[0].input_scale + q[0].input_zero_point).round() - q[0].input_zero_point)
    with torch.no_grad():
        of_float, own, int8 = model(x), model(rounded), q(x)
    assert found["0"].sqnr == pytest.approx(noise(of_float, int8), abs=1e-2)
    assert found["0"].own_sqnr == pytest.approx(noise(own, int8), abs=1e-2)
    assert entered.sqnr == pytest.approx(noise(x, rounded), abs=1e-2)


def noise(one: Tensor, other: Tensor) -> float:
    return float(10 * torch.log10(one.double().square().sum() / (one - other).double().square().sum()))


def test_clipping_is_named() -> None:
    model, x = network(), torch.randn(8, 3, 8, 8)
    found = compare(model, converted(model, 0.05 * x), [x])
    assert "clipping" in found["input_0"].cause
    assert "more data" in found["input_0"].advice
    assert found["input_0"].clipped > 0.01


def test_outliers_are_named() -> None:
    model, x = network(), torch.randn(8, 3, 64, 64)
    x[0, 0, 0, 0] = 1000.0
    model[5] = nn.Linear(8 * 60 * 60, 4)
    with pytest.warns(CalibrationWarning, match="layer '5' stays float: .* one scale is too coarse"):
        q = converted(model, x)
    entered = compare(model, q, [x])["input_0"]
    assert "outliers" in entered.cause
    assert entered.histogram is not None
    assert entered.histogram.high == 1000.0
    assert sum(entered.histogram.counts) == x.numel()


def test_range_spread_is_named() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval(), torch.randn(64, 8)
    with torch.no_grad():
        model[0].weight *= torch.logspace(0, -3, 8)[:, None]
        model[0].bias.zero_()
    q = converted(model, 10 * x)
    [step] = [step for step in compare(model, q, [x]) if step.name == "0"]
    assert "range spread" in step.cause


def test_one_scale_for_unlike_weights_is_named() -> None:
    model, x = network(), torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        model[2].weight[0, 0, 0, 0] = 50.0  # which meets a channel that is always zero
        model[0].weight[0] = model[0].bias[0] = 0.0
    prepared = prepare(model, x, Recipe({"2": QConfig(per_channel=False, activation_observer="minmax")}))
    prepared(x)
    step = compare(model, convert(prepared), [x])["2"]
    assert step.cause == "one weight scale for all channels", step
    assert step.rule == "\"2\": quant.QConfig(activation_observer='minmax')"


def test_dynamic_models_are_compared_too() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    torch.manual_seed(0)
    model, x = Tagger().eval(), torch.randn(5, 2, 8)
    found = compare(model, quantize_dynamic(model, Recipe({nn.LSTM: QConfig(weight_bits=3)})), [x])
    assert [step.name for step in found] == ["lstm", "head"]
    assert found["head"].own_sqnr > 30 > found["lstm"].own_sqnr


def test_layers_that_no_batch_reached_are_listed() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else self.b(x)

    torch.manual_seed(0)
    model, x = Either().eval(), torch.rand(16, 8)
    found = compare(model, quantize_dynamic(model), [x])
    assert found.unreached == ("b",)
    assert "no batch reached b" in str(found)


def test_the_model_is_left_as_it_was() -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    q = converted(model, x)
    model.train()
    model[1].eval()
    compare(model, q, [x])
    assert model.training
    assert not model[1].training
    assert not any(module._forward_hooks for module in [*model.modules(), *q.modules()])


def test_parity_prints_the_share_of_unequal_values() -> None:
    model, x = network(), torch.randn(8, 3, 8, 8)
    prepared = prepare(model, x, RECIPE)
    prepared(x)
    q = convert(prepared)
    found = parity(prepared, q, [x[:4], x[4:]])
    assert found.holds
    assert found.unequal < 0.01
    assert {step.name: step.values for step in found} == {"0": 8 * 8 * 36, "2": 8 * 8 * 16, "4": 8 * 128, "5": 32}
    assert "total" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["holds"]
    q[0].q_weight[0] += 3  # what the integers compute is no longer what was simulated
    broken = parity(prepared, q, [x])
    assert not broken.holds
    assert broken.steps[0].name == "0"
    assert broken.unequal > found.unequal


def test_parity_of_views_of_what_was_made_contiguous() -> None:
    """Making integers contiguous is left out, and the simulation got them in channels last."""

    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(nn.functional.adaptive_avg_pool2d(self.conv(x), 2).contiguous().view(x.size(0), -1))

    torch.manual_seed(0)
    model, x = Viewed().eval(), torch.randn(2, 3, 8, 8)
    prepared = prepare(model, x, RECIPE)
    prepared(x)
    found = parity(prepared, convert(prepared), [x])
    assert found.holds
    assert {step.name for step in found} >= {"conv", "fc"}


class Scaled(nn.Module):
    """Multiplies integers by a view of a parameter, which becomes a look-up table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.pool = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.AvgPool2d(3, 1, 1)
        self.gamma = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(y + (self.pool(y) - y) * self.gamma.view(-1, 1, 1))


def test_parity_where_a_table_holds_what_follows_from_a_parameter() -> None:
    torch.manual_seed(0)
    model, x = Scaled().eval(), torch.randn(4, 3, 12, 12)
    prepared = prepare(model, x, RECIPE)
    prepared(x)
    found = parity(prepared, convert(prepared), [x])
    assert found.holds
    assert any(step.name.startswith("mul_") for step in found)


class Branches(nn.Module):
    """A branch on values, which no graph shows, around two layers that one does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc(x)) if x.abs().sum() > 0 else x


def test_parity_of_islands() -> None:
    torch.manual_seed(0)
    model, x = Branches().eval(), torch.randn(16, 8)
    prepared = prepare(model, x, RECIPE)
    prepared(x)
    found = parity(prepared, convert(prepared), [x])
    assert found.holds
    assert {step.name for step in found} >= {"body.0", "body.2"}


def test_layers_of_islands_are_compared_too() -> None:
    torch.manual_seed(0)
    model, x = Branches().eval(), torch.randn(16, 8)
    found = compare(model, converted(model, x), [x])
    assert {step.name for step in found} == {"fc", "body.0", "body.2", "body.input_0"}
    assert all(step.sqnr > 25 for step in found)


def test_models_that_do_not_fit_are_refused() -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    with pytest.raises(ValueError, match=r"expected a model from quant\.convert"):
        compare(model, model, [x])
    with pytest.raises(ValueError, match="no batch came"):
        compare(model, converted(model, x), [])
    with pytest.raises(TypeError, match="put a single batch in a list"):
        compare(model, converted(model, x), x)
    with pytest.raises(ValueError, match=r"expected a model from quant\.prepare"):
        parity(model, model, [x])


class InPlace(nn.Module):
    """Writes over what layers gave, as MobileNets and ResNets do; with `kept` it computes the same without."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.kept = kept
        self.first, self.act, self.last = nn.Conv2d(3, 8, 3), nn.Hardswish(inplace=not kept), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(x))
        y = torch.sin(y) if self.kept else y.sin_()
        return self.last(y)


@pytest.mark.parametrize("dynamic", [False, True])
def test_another_float_model_is_refused_with_what_it_does_not_have(dynamic: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LSTM(4, 4)).eval()
    batches = [torch.randn(3, 5, 4)]
    if dynamic:
        converted = quantize_dynamic(model)
    else:
        prepared = prepare(model, batches[0])
        prepared(*batches)
        converted = convert(prepared)
    assert compare(model, converted, batches).steps
    message = r"quant.compare: the int8 model has '\d', which Linear does not have; give the float model"
    with pytest.raises(ValueError, match=message):
        compare(nn.Linear(4, 4), converted, batches)
    with pytest.raises(ValueError, match=r"the int8 model has '2', which Sequential does not have"):
        compare(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), converted, batches)
    with pytest.raises(TypeError, match=r"quant.compare: model is a int, expected the float nn.Module"):
        compare(3, converted, batches)  # type: ignore[arg-type]


def test_activations_in_place_change_no_number() -> None:
    def found(kept: bool) -> list[tuple[str, float, float]]:
        torch.manual_seed(0)
        model, x = InPlace(kept).eval(), torch.randn(4, 3, 16, 16)
        q = converted(model, x.clone())
        compared = compare(model, q, [x])
        assert parity(_prepared(model, x), q, [x]).holds
        return [(step.kind, step.own_sqnr, step.sqnr) for step in map(compared.__getitem__, compared.order)]

    kept, written = found(kept=True), found(kept=False)
    assert [kind for kind, *_ in written] == [kind for kind, *_ in kept]
    for one, other in zip(written, kept, strict=True):
        assert one[1:] == pytest.approx(other[1:], abs=0.1)
        assert one[2] > 25


def _prepared(model: nn.Module, x: Tensor) -> nn.Module:
    prepared = prepare(model, x.clone(), RECIPE)
    prepared(x.clone())
    return prepared


class Island(nn.Module):
    """Cannot be captured, so that its layers are units by themselves, and writes over what one of them gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu_()
        return y * 2 if float(y.detach().sum()) > 1e9 else y


def test_an_island_may_write_over_what_its_layers_gave() -> None:
    torch.manual_seed(0)
    model, x = Island().eval(), torch.randn(64, 8)
    q = converted(model, x)
    with torch.no_grad():
        truth = noise(model.layer(x), q.layer(x))
    assert compare(model, q, [x])["layer"].sqnr == pytest.approx(truth, abs=1e-3)


def test_comparisons_are_made_in_eval_mode_and_leave_every_mode() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)), torch.randn(64, 8)
    prepared = prepare_qat(model, x).train()
    schedule = QATSchedule(prepared, steps=8)
    for _ in range(8):
        prepared(x)
        schedule.step()
    q = convert(prepared)
    q[1].train()
    prepared[2].eval()
    modes = [[module.training for module in one.modules()] for one in (prepared, q, model)]
    assert parity(prepared, q, [x]).holds
    expected = compare(model, convert(prepared), [x]).to_dict()
    assert compare(model, q, [x]).to_dict() == expected
    with pytest.raises(TypeError):
        compare(model, q, [None])
    assert modes == [[module.training for module in one.modules()] for one in (prepared, q, model)]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    "hook",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 0.3),
    ],
    ids=["weight_norm", "spectral_norm", "pruned"],
)
def test_weights_that_a_hook_of_torch_computes_are_compared(
    hook: Callable[[nn.Module], object], tmp_path: Path
) -> None:
    model, data = network(), torch.randn(8, 3, 8, 8)
    for name in ("2", "5"):
        hook(model.get_submodule(name))
    model.eval()
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        before = model(data)
    q = converted(model, data)
    save(q, tmp_path / "q.q8")
    with torch.no_grad():
        expected = noise(model(data), q(data))
    for other in (q, load(tmp_path / "q.q8", model=model)):
        errors = compare(model, other, [data])
        assert [name.partition(".")[0] for name in errors.order] == ["input_0", "0", "2", "5"]
        assert errors[errors.order[-1]].sqnr == pytest.approx(expected, abs=1e-3)
    assert compare(model, quantize_dynamic(model), [data])["5"].sqnr > 20
    with torch.no_grad():
        assert torch.equal(model(data), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
