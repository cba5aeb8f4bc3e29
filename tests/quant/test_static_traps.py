"""What other tools lost a model on, each held here: no crash, no silent loss."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quant.calibrate import CalibrationWarning
from quant.kernels import available
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import quant
from quant.artefact import load, save
from quant.compare import compare
from quant.convert import convert
from quant.fusion.fused_graph import FusedGraph
from quant.leaves import register_leaf
from quant.parity import parity
from quant.prepare import prepare
from quant.qat import prepare_qat
from quant.recipe import QConfig, Recipe
from quant.report import summary
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.trees import leaves
from quant.runtime.uncaptured import UncapturedCall
from quant.static.runner import runners

RECIPE = Recipe(default=QConfig(activation_observer="minmax"))


def static(model: nn.Module, *args: Any) -> nn.Module:
    model.eval()
    with torch.no_grad():
        prepared = prepare(model, args, RECIPE)
        assert equal(prepared(*args), model(*args))
        return convert(prepared)


def equal(one: Any, other: Any) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(leaves(one), leaves(other), strict=True))


def noise(one: Any, other: Any) -> float:
    """Signal to noise of the worst output, in dB."""
    found = [
        float(10 * torch.log10(a.detach().square().sum() / (a - b).detach().square().sum().clamp(min=1e-20)))
        for a, b in zip(leaves(one), leaves(other), strict=True)
    ]
    return min(found)


class NormalisedLinear(nn.Linear):
    """An activation and a normalisation inside a layer's own forward: Detectron2's habit."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.layer_norm(super().forward(x), (self.out_features,)))


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        std = self.weight.std((1, 2, 3), keepdim=True) + 1e-5
        return F.conv2d(x, (self.weight - mean) / std, self.bias, self.stride, self.padding)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(NormalisedLinear(8, 16), nn.Linear(16, 4)), (16, 8)),
        (nn.Sequential(StandardisedConv(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), (4, 3, 8, 8)),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4)), (16, 8)),
        (nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4)), (16, 8)),
    ],
    ids=["norm and relu inside", "weight standardisation", "weight norm", "orthogonal"],
)
def test_a_layer_with_a_forward_of_its_own(model: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    converted = static(model, x)
    assert noise(model(x), converted(x)) > 25
    assert len([m for m in converted.modules() if isinstance(m, StaticLayer)]) == 2
    assert summary(converted)["0"].outcome == "int8"


def test_prelu_keeps_its_slopes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.PReLU(8), nn.Conv2d(8, 4, 1))
    model[1].weight.data.uniform_(-1, 2)
    x = torch.randn(4, 3, 8, 8)
    assert noise(model(x), static(model, x)(x)) > 30


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        y, _ = self.lstm(packed)
        padded, _ = pad_packed_sequence(y, batch_first=True)
        return self.out(padded.mean(1))


def test_packed_sequences_run() -> None:
    torch.manual_seed(0)
    model, x, lengths = Packed(), torch.randn(4, 5, 6), torch.tensor([5, 3, 2, 4])
    converted = static(model, x, lengths)
    assert noise(model(x, lengths), converted(x, lengths)) > 25
    other = torch.tensor([2, 5, 1, 1])
    assert noise(model(x, other), converted(x, other)) > 20
    assert summary(converted)["embed"].outcome == "int8"
    assert summary(converted)["out"].outcome == "int8"


class Masked(nn.Module):
    """BERT's mask: -10000 where nothing is to be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 8**0.5
        scores = scores + (1.0 - mask[:, None, :]) * -10000.0
        return self.out(scores.softmax(-1) @ self.v(x))


def test_a_mask_does_not_eat_the_range_of_the_scores() -> None:
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(4, 6, 8)
    mask = torch.ones(4, 6)
    mask[:, 4:] = 0
    converted = static(model, x, mask)
    assert noise(model(x, mask), converted(x, mask)) > 25


class Residual(nn.Module):
    """Scores handed on from layer to layer after the mask, as RealFormer does, so that a sum of integers reads them."""

    def __init__(self, mask: float) -> None:
        super().__init__()
        self.mask = mask
        self.first, self.second, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k = self.first(x).chunk(2, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(seen[:, None, :] == 0, self.mask)
        x = scores.softmax(-1) @ x
        q, k = self.second(x).chunk(2, -1)
        return self.out((q @ k.transpose(1, 2) + scores).softmax(-1) @ x)


class Fused(nn.Module):
    def __init__(self, mask: float) -> None:
        super().__init__()
        self.mask = mask
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.zeros_like(seen).masked_fill(seen == 0, self.mask)[:, None, :].expand(-1, x.shape[1], -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("mask", [-1e4, float("-inf")], ids=["-10000", "-inf"])
@pytest.mark.parametrize("kind", [Residual, Fused], ids=["scores handed on", "fused attention"])
def test_other_masks_do_not_either(kind: Any, mask: float) -> None:
    torch.manual_seed(0)
    model, x, seen = kind(mask), torch.randn(4, 6, 8), torch.ones(4, 6)
    seen[:, 4:] = 0
    converted = static(model, x, seen)
    assert noise(model(x, seen), converted(x, seen)) > 25
    assert summary(converted)["out"].outcome == "int8"


class SamePadding(nn.Conv2d):
    """Padding computed from the input's size: EfficientNet's habit."""

    def forward(self, x: Tensor) -> Tensor:
        (kernel, stride), sizes = (self.kernel_size[0], self.stride[0]), x.shape[-2:]
        wanted = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in sizes]
        sides = [side for pad in reversed(wanted) for side in (pad // 2, pad - pad // 2)]
        return F.conv2d(F.pad(x, sides), self.weight, self.bias, self.stride)


def test_padding_computed_from_the_size_is_seen_through() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SamePadding(3, 8, 3, stride=2), nn.ReLU(), SamePadding(8, 8, 3, stride=2))
    x = torch.randn(4, 3, 17, 17)
    converted = static(model, x)
    assert noise(model(x), converted(x)) > 25
    assert [summary(converted)[name].outcome for name in ("0", "2")] == ["int8", "int8"]


class Opaque(nn.Linear):
    """A forward that decides by values, and cannot be seen through."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if float(x.detach().sum()) > 1e9 else 1.0)


@pytest.mark.usefixtures("own_registries")
def test_a_layer_that_cannot_be_seen_through_is_registered_in_one_line() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Opaque(8, 8), nn.Linear(8, 4)), torch.randn(16, 8)
    register_leaf(Opaque)
    converted = static(model, x)
    assert noise(model(x), converted(x)) > 30
    assert isinstance(converted[2], Opaque)
    report = summary(converted)
    assert [report[name].outcome for name in ("0", "2", "3")] == ["int8", "float", "int8"]
    assert "registered" in report["2"].detail


class Strict(nn.Module):
    """Checks shapes and dtypes, and takes integers beside reals."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc, self.out = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, tokens: Tensor, offset: int = 1) -> Tensor:
        if x.dim() != 3 or x.shape[-1] != 8:
            raise ValueError(f"expected (batch, steps, 8), got {tuple(x.shape)}")
        assert tokens.dtype == torch.int64
        assert x.shape[:2] == tokens.shape
        return self.out(F.relu(self.fc(x)) + self.words((tokens + offset) % 10))


def test_a_forward_that_checks_shapes_and_takes_integers() -> None:
    torch.manual_seed(0)
    model, x, tokens = Strict(), torch.randn(4, 5, 8), torch.randint(10, (4, 5))
    converted = static(model, x, tokens)
    assert noise(model(x, tokens), converted(x, tokens)) > 25
    more = torch.randn(9, 5, 8), torch.randint(10, (9, 5))
    assert converted(*more).shape == (9, 5, 4)
    with pytest.raises((ValueError, RuntimeError)):
        converted(x[0], tokens)


@pytest.mark.parametrize("backend", [name for name, missing in available().items() if not missing])
def test_the_real_kernels_do_not_saturate(backend: str) -> None:
    """Every pair of products overflows 16 bits, on CPUs where vpmaddubsw adds them there."""
    model, x = nn.Sequential(nn.Linear(256, 8), nn.ReLU(), nn.Linear(8, 4)), torch.rand(16, 256) * 0.1 + 0.9
    with torch.no_grad():
        model[0].weight.copy_(torch.rand(8, 256) * 0.1 + 0.9)
        model[2].weight.copy_(torch.rand(4, 8) * 0.1 + 0.9)
    prepared = prepare(model.eval(), x, RECIPE)
    prepared(x)
    converted = convert(prepared, backend)
    assert all(step.own_sqnr > 40 for step in compare(model, converted, [x]))
    assert noise(model(x), converted(x)) > 40


def decades(bands: int = 64, count: int = 8) -> Tensor:
    """(bands,): what a band of mel power is multiplied by; eight decades from first to last."""
    return torch.logspace(count / 2, -count / 2, bands)


class Loudness(nn.Module):
    """Raw power in; the first layer's weights make up for eight decades, as those of a trained network do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32) if kind == "linear" else nn.Conv1d(64, 32, 3)
        self.second = nn.Linear(32, 4) if kind == "linear" else nn.Conv1d(32, 4, 1)
        with torch.no_grad():
            self.first.weight.div_(decades() if kind == "linear" else decades()[:, None])

    def forward(self, power: Tensor) -> Tensor:
        return self.second(F.relu(self.first(power)))


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("observer", ["histogram", "minmax", "percentile"])
def test_eight_decades_that_weights_make_up_for_are_said_and_kept_in_float(
    kind: str, observer: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Loudness(kind).eval()
    power = torch.randn(128, 64).exp() * decades() if kind == "linear" else torch.randn(8, 64, 32).exp()
    power = power if kind == "linear" else power * decades()[:, None]
    prepared = prepare(model, power, Recipe(default=QConfig(activation_observer=observer)))
    prepared(power)
    with pytest.warns(CalibrationWarning, match=r"layer 'first' stays float: .* cosine of 0\.0.* decades"):
        converted = convert(prepared)
    report = summary(converted)
    assert report["first"].outcome == "float"
    assert "cosine" in report["first"].detail
    assert report["second"].outcome == "int8"
    with torch.no_grad():
        assert noise(model(power), converted(power)) > 30
    assert parity(prepared, converted, [power]).holds
    save(converted, tmp_path / "model.safetensors")  # and is loaded as it was, without another warning
    assert torch.equal(load(tmp_path / "model.safetensors", model=model)(power), converted(power))


def test_loud_bands_alone_are_no_reason_to_stay_float() -> None:
    """Weights that do not make up for the decades hear the loud bands, in float too; int8 does as well."""
    torch.manual_seed(0)
    model, power = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(128, 64).exp() * decades()
    converted = static(model, power)
    assert noise(model(power), converted(power)) > 30


class Outliers(nn.Module):
    """A few channels of a layer norm that are `factor` times as large, and weights that make up for them."""

    def __init__(self, factor: float, kind: str) -> None:
        super().__init__()
        self.norm, self.kind = nn.LayerNorm(64), kind
        self.up = nn.Linear(64, 128) if kind == "linear" else nn.Conv1d(64, 128, 3, padding=1)
        self.down = nn.Linear(128, 64)
        with torch.no_grad():
            self.norm.weight[:4] *= factor
            self.up.weight[:, :4] /= factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.up(y) if self.kind == "linear" else self.up(y.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(y))


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_scale_that_is_coarse_for_most_channels_is_said_and_the_layer_kept_in_float(kind: str) -> None:
    """No column is so small that int8 rows would lose it; what is lost are the inputs of all the others."""
    torch.manual_seed(0)
    model, x = Outliers(60.0, kind).eval(), torch.randn(8, 20, 64)
    prepared = prepare(model, x, RECIPE)
    prepared(x)
    with pytest.warns(CalibrationWarning, match=r"layer 'up' stays float: .* cosine of 0\.9\d+ .* 1\.[89] decades"):
        converted = convert(prepared)
    assert {name: summary(converted)[name].outcome for name in ("up", "down")} == {"up": "float", "down": "int8"}
    assert noise(model(x), converted(x)) > 38
    assert parity(prepared, converted, [x]).holds


def test_large_inputs_of_a_plain_layer_are_found_too() -> None:
    torch.manual_seed(0)
    sizes = torch.ones(64).index_fill(0, torch.arange(4), 100.0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).eval(), torch.randn(64, 64) * sizes
    even = static(copy.deepcopy(model), x)  # without weights that make up for them nothing is lost, and nothing said
    assert noise(model(x), even(x)) > 28
    with torch.no_grad():
        model[0].weight.div_(sizes)
    with pytest.warns(CalibrationWarning, match="layer '0' stays float"):
        converted = static(model, x)
    assert noise(model(x), converted(x)) > 38


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_channels_that_8_bits_hold_are_no_reason_to_stay_float(factor: float) -> None:
    torch.manual_seed(0)
    model, x = Outliers(factor, "linear").eval(), torch.randn(8, 20, 64)
    assert summary(static(model, x))["up"].outcome == "int8"


def test_only_weights_with_small_columns_are_watched() -> None:
    torch.manual_seed(0)
    for factor, watched in ((1.0, 0), (60.0, 1)):
        [runner] = runners(prepare(Outliers(factor, "linear").eval(), torch.randn(8, 20, 64), RECIPE)).values()
        assert len(runner.observers) - len(runner.fused.slots) == watched


def test_dead_channels_are_no_reason_to_stay_float() -> None:
    """Channels that training switched off have vanishing weights, and inputs that are not large."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 8, 3)), torch.randn(8, 16, 8, 8)
    with torch.no_grad():
        model[0].weight[4:12] *= 1e-9
        model[0].bias[4:12] = 0
        model[2].weight[:, 4:14] *= 1e-9
    converted = static(model, x)
    assert noise(model(x), converted(x)) > 25
    assert [summary(converted)[name].outcome for name in ("0", "2")] == ["int8", "int8"]


class LogMel(nn.Module):
    """A filter bank over power, and its logarithm: what is small counts as much as what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.out = nn.Linear(64, 64, bias=False), nn.Linear(64, 4)
        with torch.no_grad():
            self.bank.weight.copy_(torch.eye(64) + 0.1 * torch.eye(64).roll(1, 0))

    def forward(self, power: Tensor) -> Tensor:
        return self.out(torch.log(self.bank(power) + 1e-6))


def test_eight_decades_before_a_logarithm_are_said_and_kept_in_float() -> None:
    torch.manual_seed(0)
    model, power = LogMel().eval(), torch.randn(128, 64).exp() * decades()
    prepared = prepare(model, power)
    prepared(power)
    with pytest.warns(
        CalibrationWarning, match=r"layer 'bank' stays float: \d+% of its input's values would round to zero"
    ):
        converted = convert(prepared)
    assert summary(converted)["out"].outcome == "int8"
    with torch.no_grad():
        assert noise(model(power), converted(power)) > 30


def test_a_logarithm_of_an_ordinary_range_leaves_int8_alone() -> None:
    torch.manual_seed(0)
    model, power = LogMel().eval(), torch.rand(128, 64) + 0.5
    converted = static(model, power)
    assert summary(converted)["bank"].outcome == "int8"


def fused_graph_of(model: nn.Module, *args: Any) -> FusedGraph:
    return runners(prepare(model.eval(), args, RECIPE))[""].fused


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x**2,
        torch.square,
        lambda x: torch.sqrt(x.abs()),
        lambda x: torch.log(x.abs() + 1),
        lambda x: x / (x.abs() + 1),
        torch.exp,
        torch.rsqrt,
    ],
    ids=["power", "square", "square root", "logarithm", "division", "exponential", "reciprocal root"],
)
def test_functions_that_bend_the_range_stay_float(function: Any) -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(function(self.a(x)))

    fused = fused_graph_of(Between(), torch.rand(8, 4))
    assert {step.operator.name for step in fused.steps} <= {"linear", "float", "shape", "lookup", "add"}
    assert any(step.operator.name == "float" and step.reason for step in fused.steps)


def test_float_steps_between_integers_stand_in_the_report() -> None:
    converted = static(
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 2)), torch.randn(4, 8)
    )
    report = summary(converted)
    assert report["1"].detail == "LayerNorm has no int8 kernel"
    assert report["2"].detail == "Softmax has no int8 kernel"


def test_weights_with_nan_are_refused_by_name() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.randn(4, 4)
    prepared = prepare(model, x, RECIPE)
    prepared(x)
    prepared[2].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"layer '2': its weight holds NaN or inf"):
        convert(prepared)
    model[2].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"layer '2': its weight holds NaN or inf"):
        prepare(model, x, RECIPE)


class Spoiled(nn.Module):
    """A norm that is folded, norms that run as they are, a layer that no call reaches, and one value of one tensor."""

    def __init__(self, name: str, value: float) -> None:
        super().__init__()
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8)
        self.layers, self.unused = nn.Sequential(*layers, nn.BatchNorm2d(8)), nn.Linear(2, 2)
        self.state_dict()[name].view(-1)[1] = value

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


SPOILED = [
    ("layers.0.weight", math.nan, "holds NaN or inf"), ("layers.0.bias", math.inf, "holds NaN or inf"),
    ("layers.1.weight", math.nan, "holds NaN or inf"), ("layers.1.running_mean", math.nan, "holds NaN or inf"),
    ("layers.1.running_var", math.nan, "holds NaN or inf"), ("layers.1.running_var", -0.5, "is -0.5 at its smallest"),
    ("layers.3.weight", -math.inf, "holds NaN or inf"), ("layers.4.bias", math.nan, "holds NaN or inf"),
    ("layers.5.running_var", -2.0, "is -2 at its smallest"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "text"), SPOILED)
def test_the_layer_that_spoils_all_others_is_named_before_calibration(name: str, value: float, text: str) -> None:
    layer, _, tensor = name.rpartition(".")
    batches = [torch.randn(2, 3, 8, 8)] * 2
    model = Spoiled(name, value).eval()
    before = {key: one.clone() for key, one in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"layer '{layer}': its {tensor} {text}"):
        quant.quantize_static(model, batches, progress=False)
    assert all(torch.equal(one.nan_to_num(7), before[key].nan_to_num(7)) for key, one in model.state_dict().items())
    if math.isfinite(value):  # a variance that training moves
        quant.prepare_qat(model, batches[0])
        return
    with pytest.raises(ValueError, match=f"layer '{layer}': its {tensor} {text}"):
        quant.prepare_qat(model, batches[0])


def test_weights_that_no_call_reads_may_hold_nan() -> None:
    model, x = Spoiled("unused.weight", math.nan).eval(), torch.randn(2, 3, 8, 8)
    assert quant.quantize_static(model, [x], progress=False)(x).isfinite().all()


def test_a_weight_of_a_function_with_nan_is_refused_by_name() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4, 4), math.nan))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    with pytest.raises(ValueError, match=r"layer '1\.linear_\d+': its weight holds NaN or inf"):
        prepare(nn.Sequential(nn.Linear(4, 4), Product()).eval(), torch.randn(4, 4), RECIPE)


def test_zeros_in_and_constant_layers_convert() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    x = torch.zeros(2, 1, 2, 2)
    converted = static(model, x)
    assert torch.allclose(converted(x), model(x), atol=1e-3)


def test_gradients_and_double_inputs_are_told_apart() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(4, 4)
    converted = static(model, x)
    assert not any(parameter.requires_grad for parameter in converted.parameters())
    assert converted(x.requires_grad_()).shape == (4, 2)


def test_a_channel_with_vanishing_weights_keeps_its_bias() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    model[1].weight.data[1] = 1e-14
    model[1].bias.data[1] = 0.7
    x = torch.randn(4, 3, 8, 8)
    converted = static(model, x)
    assert noise(model(x), converted(x)) > 30


class Between(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.function(torch.relu(self.first(x))))
        return result


SPELLINGS: dict[str, tuple[Any, Any]] = {
    "mean": (
        lambda y: y * y.mean(dim=(2, 3), keepdim=True),
        lambda y: y * y.mean(axis=(2, 3), keepdims=True),
    ),
    "mean of an array": (
        lambda y: y - torch.mean(y, dim=1, keepdim=True),
        lambda y: y - torch.mean(a=y, axis=1, keepdims=True),
    ),
    "sum": (lambda y: y - y.sum(dim=1, keepdim=True), lambda y: y - y.sum(axis=1, keepdims=True)),
    "stack": (lambda y: torch.stack([y, -y], dim=1)[:, 0], lambda y: torch.stack([y, -y], axis=1)[:, 0]),
    "cat": (
        lambda y: torch.cat([y[:, 4:], y[:, :4]], dim=1),
        lambda y: torch.cat([y[:, 4:], y[:, :4]], axis=1),
    ),
    "chunk": (
        lambda y: torch.stack(y.chunk(2, dim=3)).amax(0).repeat(1, 1, 1, 2),
        lambda y: torch.stack(y.chunk(2, axis=3)).amax(0).repeat(1, 1, 1, 2),
    ),
    "unbind": (lambda y: torch.stack(y.unbind(dim=1), 1), lambda y: torch.stack(y.unbind(axis=1), 1)),
    "softmax": (lambda y: y.softmax(dim=1), lambda y: y.softmax(axis=1)),
    "two operands": (lambda y: torch.add(y, y), lambda y: torch.add(x1=y, x2=y)),
    "names of its own": (lambda y: y + torch.cdist(y, y), lambda y: y + torch.cdist(x1=y, x2=y)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_arguments_by_the_names_of_numpy_are_the_same(name: str) -> None:
    results = []
    x, other = torch.randn(2, 2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    for spelling in SPELLINGS[name]:
        torch.manual_seed(3)
        q = static(Between(spelling), x)
        with torch.no_grad():
            results.append(q(other))
    assert torch.equal(*results)


class Flat(nn.Module):
    """Layers that take any leading dimensions, and something between them that means the number of dimensions."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8))
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.function(self, self.first(x)))
        return result


@pytest.mark.parametrize(
    "function",
    [
        lambda self, y: torch.relu(y) - torch.relu(y).mean(),
        lambda self, y: torch.relu(y) + torch.tanh(self.shift),
        lambda self, y: torch.relu(self.norm(y)),
    ],
    ids=["mean of all", "a number per channel", "a batch norm"],
)
def test_other_numbers_of_dimensions_than_the_captured_one(function: Any) -> None:
    torch.manual_seed(4)
    model, x = Flat(function).eval(), torch.randn(64, 8)
    q = static(model, x)
    with torch.no_grad(), pytest.warns(UncapturedCall, match="was of 2 dimensions in example_inputs and is of 3 now"):
        assert noise(model(x.view(8, 8, 8)), q(x.view(8, 8, 8))) > 35
    with torch.no_grad():
        assert noise(model(x[:32]), q(x[:32])) > 30


def test_an_image_without_a_batch() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)).eval()
    x = torch.randn(4, 3, 16, 16)
    q = static(model, x)
    with torch.no_grad(), pytest.warns(UncapturedCall, match="was of 4 dimensions in example_inputs and is of 3 now"):
        assert noise(model(x[0]), q(x[0])) > 30


class Loop(nn.Module):
    """A recurrent network by hand, whose state begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h, self.out = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, steps = torch.zeros(x.shape[0], 32), []
        for t in range(x.shape[1]):
            h = torch.tanh(self.x(x[:, t]) + self.h(h))
            steps.append(h)
        result: Tensor = self.out(torch.stack(steps, 1))
        return result


def test_a_layer_that_is_called_with_zeros_once_keeps_its_weight() -> None:
    torch.manual_seed(6)
    model, x = Loop().eval(), torch.randn(16, 5, 8)
    q = static(model, x)
    with torch.no_grad():
        assert noise(model(x), q(x)) > 30


def test_a_layer_that_is_trained_with_zeros_once_keeps_its_weight() -> None:
    torch.manual_seed(7)
    model, x = Loop(), torch.randn(16, 5, 8)
    p = prepare_qat(model, x, RECIPE)
    for _ in range(3):
        p(x)
    p.eval()
    with torch.no_grad():
        assert noise(model(x), p(x)) > 30
        assert noise(p(x), convert(p)(x)) > 100


class Gained(nn.Module):
    """A view of a convolution's output, behind a branch that calibration may not have taken."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 8 * 8, 4)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        y = torch.relu(self.conv(x))
        if gain is not None:
            y = y * gain
        result: Tensor = self.linear(y.view(y.shape[0], -1))
        return result


def test_a_view_of_an_image_in_a_call_that_no_program_takes() -> None:
    torch.manual_seed(8)
    model, x = Gained().eval(), torch.randn(4, 3, 8, 8)
    q = static(model, x)
    with torch.no_grad(), pytest.warns(UncapturedCall):
        assert noise(model(x, torch.ones(1)), q(x, torch.ones(1))) > 25


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_in_a_call_that_no_program_takes_spoils_its_own_sample(value: float) -> None:
    torch.manual_seed(9)
    model, x = Gained().eval(), torch.randn(4, 3, 8, 8)
    q = static(model, x)
    x[0, 1, 2, 3] = value
    with torch.no_grad(), pytest.warns(UncapturedCall):
        y = q(x, torch.ones(1))
    assert noise(model(x, torch.ones(1))[1:], y[1:]) > 25
    assert not torch.isfinite(y[0]).any()
