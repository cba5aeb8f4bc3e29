"""Weights of dynamic layers whose range an observer chooses: its scale, plainly rounded, in every kind of layer."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from quant.kernels import QParams, narrow, weight_scheme
from quant.kernels.scheme import weight_scale
from quant.observers import make_observer
from torch import Tensor, nn

import quant
from quant import QConfig, Recipe, RecipeError


class Model(nn.Module):
    """Linear layers whose inputs 32 does and does not divide, and a recurrent layer of two layers and directions."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.odd = nn.Linear(64, 24), nn.Linear(24, 20)
        self.lstm = nn.LSTM(20, 32, 2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.odd(torch.relu(self.wide(x))))[0]  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    model = Model().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 1 + 4 * (torch.rand(weight.shape) < 0.01)  # some weights that are worth clipping
    return model


def by_observer(rows: Tensor, bits: int, kind: str, per_channel: bool = True, **options: Any) -> tuple[Tensor, Tensor]:
    """int8 rows (N, K) and their scale (N,), by an observer that looks at the whole weight once.

    Of "mse" that of all values where it has less error.
    """
    scheme, whole = weight_scheme(bits), rows if per_channel else rows.reshape(1, -1)
    observer = make_observer(kind, scheme, **options)
    observer(whole)
    scale = observer.qparams().scale
    if kind == "mse":
        clipped, widest = (rounding_error(whole, one, bits) for one in (scale, weight_scale(whole, bits=bits)))
        scale = torch.where(clipped <= widest, scale, weight_scale(whole, bits=bits))
    scale = scale.expand(len(rows)).contiguous()
    return QParams(scale, torch.zeros(len(rows), dtype=torch.int32), scheme).quantize(rows), scale


def rounding_error(rows: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The squared error of each of rows (N, K) rounded by scales (N,)."""
    top, steps = 2 ** (bits - 1) - 1, (rows / scale[:, None]).round()
    return (steps.clamp(-top, top) * scale[:, None] - rows).double().square().sum(1)


def integers(layer: Any, bits: int, suffix: str = "") -> Tensor:
    """int8 (N, K) of a layer's weight, however it is stored."""
    stored: Tensor = getattr(layer, f"q_weight{suffix}")
    return narrow.unpack(stored) - 2 ** (bits - 1) if narrow.is_narrow(stored) else stored


@pytest.mark.parametrize("per_channel", [True, False], ids=["per channel", "per tensor"])
@pytest.mark.parametrize("bits", [8, 5, 4, 3, 2])
@pytest.mark.parametrize("kind", ["mse", "percentile"])
def test_integers_are_those_of_the_observers_scale(model: Model, kind: str, bits: int, per_channel: bool) -> None:
    options = {"percentile": 99.0} if kind == "percentile" else {}
    qconfig = QConfig(weight_bits=bits, weight_observer=kind, weight_options=options, per_channel=per_channel)
    q: Any = quant.quantize_dynamic(model, Recipe({nn.Linear: qconfig}, default=None))
    for name in ("wide", "odd"):
        rows, layer = model.get_submodule(name).weight.detach(), q.get_submodule(name)  # type: ignore[operator, union-attr]
        expected, scale = by_observer(rows, bits, kind, per_channel, **options)
        assert torch.equal(layer.scale, scale)
        assert torch.equal(integers(layer, bits).to(torch.int8), expected)


def test_recurrent_layers_have_it_for_inputs_and_states(model: Model) -> None:
    qconfig = QConfig(weight_bits=4, weight_observer="mse", activation_bits=8)
    q: Any = quant.quantize_dynamic(model, Recipe({"lstm": qconfig}, default=None))
    parts = [part for part in q.lstm.modules() if hasattr(part, "q_weight_hh")]
    hidden = [getattr(model.lstm, f"weight_hh_l{layer}{way}").detach() for layer in (0, 1) for way in ("", "_reverse")]
    assert len(parts) == len(hidden)
    for part, rows in zip(parts, hidden, strict=True):
        expected, scale = by_observer(rows, 4, "mse")
        assert torch.equal(part.scale_hh, scale)
        assert torch.equal(integers(part, 4, "_hh").to(torch.int8), expected)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_mse_leaves_less_error_in_the_weights_of_few_bits(model: Model, bits: int) -> None:
    def error(kind: str) -> float:
        qconfig = QConfig(weight_bits=bits, weight_observer=kind)
        q: Any = quant.quantize_dynamic(model, Recipe({nn.Linear: qconfig}, default=None))
        return float((q.wide.weight - model.wide.weight).detach().square().mean())

    assert error("mse") < error("minmax")


@pytest.mark.parametrize("spread", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("bits", [8, 7, 4])
def test_mse_leaves_no_row_more_error_than_its_whole_range(bits: int, spread: float) -> None:
    """Of columns scaled by their norms, where the input takes 16 bits: a histogram says it too roughly."""
    torch.manual_seed(0)
    layer = nn.Linear(128, 64).eval()
    with torch.no_grad():
        layer.weight.normal_().mul_(torch.logspace(0, -math.log10(spread), 128))
    errors = []
    for kind in ("mse", "minmax"):
        qconfig = QConfig(weight_bits=bits, weight_observer=kind, activation_bits=16)
        q: Any = quant.quantize_dynamic(layer, Recipe(default=qconfig))
        errors.append(rounding_error(layer.weight.detach() / q.columns, q.scale, bits))
    assert bool((errors[0] <= errors[1]).all())
    assert not torch.equal(*errors)


def test_a_clipped_model_is_said_saved_and_loaded_to_the_bit(model: Model, tmp_path: Path) -> None:
    q = quant.quantize_dynamic(model, Recipe(default=QConfig(weight_bits=4, weight_observer="mse")))
    assert "weights per channel (mse)" in quant.summary(q)["wide"].detail
    quant.save(q, tmp_path / "m.safetensors")
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        assert torch.equal(quant.load(tmp_path / "m.safetensors", model=Model())(x), q(x))


def test_a_layer_of_a_half_type_has_the_scale_of_its_values(model: Model) -> None:
    half = nn.Sequential(nn.Linear(64, 24)).to(torch.bfloat16).eval()
    q: Any = quant.quantize_dynamic(half, Recipe(default=QConfig(weight_bits=4, weight_observer="mse")))
    assert torch.equal(q[0].scale, by_observer(half[0].weight.detach().float(), 4, "mse")[1])


def test_columns_are_scaled_before_the_range_is_chosen() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 16).eval()
    with torch.no_grad():
        layer.weight[:, 0] *= 1e-4  # lost by 8 bits, so that the input takes 16
    q: Any = quant.quantize_dynamic(layer, Recipe(default=QConfig(weight_bits=3, weight_observer="mse")))
    assert q.activation_bits == 16
    expected, scale = by_observer(layer.weight.detach() / q.columns, 3, "mse")
    assert torch.equal(q.scale, scale)
    assert torch.equal(integers(q, 3).to(torch.int8), expected)


def test_learned_rounding_keeps_the_scale_that_was_asked_for(model: Model) -> None:
    torch.manual_seed(1)
    data = [torch.randn(8, 5, 64) for _ in range(4)]
    for kind in ("mse", "minmax"):
        recipe = Recipe({nn.Linear: QConfig(weight_bits=4, weight_observer=kind)}, default=None)
        q: Any = quant.quantize_dynamic(model, recipe, batches=data, rounding="gptq", progress=False)
        asked = by_observer(model.wide.weight.detach(), 4, "mse")[1]
        assert torch.equal(q.wide.scale, asked) == (kind == "mse")


@pytest.mark.parametrize(
    ("here", "there", "match"),
    [
        ({}, {"weight_observer": "mse"}, "weight_observer minmax here and mse there"),
        (
            {"weight_observer": "percentile", "weight_options": {"percentile": 99.0}},
            {"weight_observer": "percentile", "weight_options": {"percentile": 90.0}},
            "weight_options .*99.* here and .*90.* there",
        ),
    ],
    ids=["observer", "options"],
)
def test_a_shared_weight_has_one_observer(here: dict[str, Any], there: dict[str, Any], match: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).eval()
    model[1].weight = model[0].weight
    recipe = Recipe({"0": QConfig(weight_bits=4, **there), "1": QConfig(weight_bits=4, **here)})
    with pytest.raises(RecipeError, match=rf"its weight is also that of '0', but the recipe asks for {match}"):
        quant.quantize_dynamic(model, recipe)
    q: Any = quant.quantize_dynamic(model, Recipe(default=QConfig(weight_bits=4, **there)))
    assert q[1].q_weight is q[0].q_weight


def test_an_empty_layer_has_the_scale_of_no_weights() -> None:
    layer = nn.Linear(1, 3)
    layer.in_features, layer.weight = 0, nn.Parameter(torch.zeros(3, 0))
    q: Any = quant.quantize_dynamic(layer, Recipe(default=QConfig(weight_observer="mse")))
    assert torch.equal(q.scale, weight_scale(torch.zeros(3, 0)))


@pytest.mark.parametrize(
    ("layer", "settings", "match"),
    [
        (nn.Linear(8, 8), {"weight_observer": "lsq"}, r"'lsq', which is learned in training \(quant\.prepare_qat\)"),
        (nn.Embedding(8, 8), {"weight_observer": "mse"}, r"'mse', and rows of tables have the range of their values"),
        (
            nn.Linear(64, 8),
            {"weight_observer": "percentile", "weight_bits": 4, "group_size": 32},
            r"'percentile', and groups of inputs take 'minmax' or 'mse'; choose one, or leave group_size out",
        ),
        (
            nn.Linear(64, 8),
            {"weight_observer": "mse", "weight_options": {"bins": 64}, "weight_bits": 4, "group_size": 32},
            r"'mse' with \{'bins': 64\}, and groups of inputs are searched without a histogram; leave weight_options",
        ),
    ],
    ids=["learned", "table", "groups", "options of groups"],
)
def test_ranges_that_a_layer_cannot_have_name_layer_and_rule(
    layer: nn.Module, settings: dict[str, Any], match: str
) -> None:
    model = nn.Sequential(layer)
    with pytest.raises(RecipeError, match=rf"layer '0' \({type(layer).__name__}\): .*asks for weight_observer {match}"):
        quant.quantize_dynamic(model, Recipe({"0": QConfig(**settings)}))
    assert type(model[0]) is type(layer)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [32, 64])
def test_groups_have_the_range_of_least_squared_error(bits: int, symmetric: bool, size: int) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleDict({"linear": nn.Linear(128, 70), "lstm": nn.LSTM(128, 64)})
    plain = QConfig(weight_bits=bits, group_size=size, weight_symmetric=symmetric)
    clipped = dataclasses.replace(plain, weight_observer="mse")
    for name, parameter, suffix in (("linear", "weight", ""), ("lstm", "weight_ih_l0", "_ih")):
        weight = layers[name].get_parameter(parameter).detach()
        errors = []
        for settings in (plain, clipped):
            q = quant.quantize_dynamic(layers, Recipe(default=settings))
            state = q.state_dict()
            place = "linear." if name == "linear" else next(key for key in state if key.endswith("q_weight_ih"))[:-11]
            real = narrow.dequantize(state[f"{place}q_weight{suffix}"], state[f"{place}scale{suffix}"])
            errors.append((real - weight).square().unflatten(1, (-1, size)).sum(2))
        assert (errors[1] <= errors[0] * (1 + 1e-4)).all()
        assert float(errors[1].sum()) < 0.98 * float(errors[0].sum())
        grid = best_of_shares(weight.unflatten(1, (-1, size)), bits, symmetric)
        assert float(errors[1].sum()) < 1.02 * float(grid.sum())
        assert "(mse)" in quant.summary(q)[name].detail


def test_no_group_is_clipped_out_of_float16() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        layer.weight[3, :32] *= 7 * narrow.HALF_MIN * 1.03 / layer.weight[3, :32].abs().max()
    settings = QConfig(weight_bits=4, group_size=32, weight_observer="mse")
    q: Any = quant.quantize_dynamic(layer, Recipe(default=settings))
    assert q.scale.dtype == torch.float16


def test_rounding_by_outputs_chooses_the_ranges_of_groups_itself() -> None:
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(64, 32)), [torch.randn(64, 64) @ torch.randn(64, 64) for _ in range(2)]
    plain = QConfig(weight_bits=3, group_size=32)
    one, other = (
        quant.quantize_dynamic(model, Recipe(default=each), batches=batches, rounding="gptq")
        for each in (plain, dataclasses.replace(plain, weight_observer="mse"))
    )
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    assert "(mse)" not in quant.summary(other)["0"].detail


def best_of_shares(groups: Tensor, bits: int, symmetric: bool) -> Tensor:
    """The least squared error of each group, over a fine grid of shares of its range."""
    top, errors = 2 ** (bits - 1) - 1, []
    for share in torch.linspace(0.2, 1.0, 120):
        if symmetric:
            scale, zero, low, high = groups.abs().amax(2) * share / top, torch.zeros(1), -top, top
        else:
            ends = groups.amin(2).clamp(max=0) * share, groups.amax(2).clamp(min=0) * share
            scale, low, high = (ends[1] - ends[0]) / (2**bits - 1), 0, 2**bits - 1
            zero = (-ends[0] / scale).round()
        u = ((groups / scale[..., None]).round() + zero[..., None]).clamp(low, high)
        errors.append(((u - zero[..., None]) * scale[..., None] - groups).square().sum(2))
    return torch.stack(errors).amin(0)
