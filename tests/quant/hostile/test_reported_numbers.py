"""Wrong numbers that users reported, from models that stay as they are: state, ranges, NaN, accuracy."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quant.calibrate import CalibrationWarning
from torch import Tensor, nn

import quant

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


def static(model: nn.Module, batches: list[Any], recipe: quant.Recipe | None = None) -> nn.Module:
    return quant.quantize_static(model.eval(), batches, recipe, progress=False)


@torch.no_grad()
def decibels(expected: Tensor, found: Tensor) -> float:
    error = (expected.double() - found.double()).square().sum().clamp(min=1e-30)
    return float(10 * torch.log10(expected.double().square().sum() / error))


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))


@torch.no_grad()
def test_a_state_dict_loaded_into_a_model_of_another_calibration_brings_the_ranges_or_is_refused() -> None:
    images = [torch.randn(2, 3, 16, 16) for _ in range(2)]
    one, other = static(convnet(), images), static(convnet(), [20 * image for image in images])
    with contextlib.suppress(RuntimeError, ValueError):  # what ranges it may not take must be said
        other.load_state_dict(one.state_dict())
        assert torch.equal(other(images[0]), one(images[0]))


@torch.no_grad()
def test_a_sample_with_nan_gives_nan_and_leaves_the_others() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)
    ).eval()
    images = torch.randn(2, 3, 16, 16)
    q = static(model, [images] * 2)
    spoilt = images.clone()
    spoilt[0] = float("nan")
    assert q(spoilt)[0].isnan().all()
    assert torch.equal(q(spoilt)[1], q(images)[1])


class Streaming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 16, 3)
        self.register_buffer("context", torch.zeros(1, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.context, x], 2)
        self.context = x[:, :, -2:]
        return self.conv(x)


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.layer(x - self.mean)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "shape"), [(Streaming, (1, 4, 16)), (Averaging, (16, 8))], ids=["buffer assigned", "buffer in place"]
)
def test_calibration_leaves_no_state_behind(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    model, batches = kind(), [torch.randn(shape) for _ in range(4)]
    q = static(copy.deepcopy(model), batches)
    for batch in batches:
        assert decibels(model(batch), q(batch)) > 30


def test_a_fixed_range_without_its_ends_is_refused() -> None:
    with pytest.raises((quant.RecipeError, ValueError, TypeError), match="fixed"):
        static(
            nn.Sequential(nn.Linear(8, 8)),
            [torch.randn(64, 8)],
            quant.Recipe(default=quant.QConfig(activation_observer="fixed")),
        )


class Spread(nn.Module):
    """A LayerNorm puts out four channels 60 times as large as the others, and the next weight makes up for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
        with torch.no_grad():
            self.norm.weight[:4] *= 60
            self.up.weight[:, :4] /= 60

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Columns(nn.Module):
    """Four columns of the input are a hundred times as large; the weight is of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)
        self.register_buffer("size", torch.ones(64))
        self.size[:4] = 100

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x * self.size)[:, :8] + self.up(x)[:, 8:16]


@pytest.mark.parametrize("model", [Spread(), Columns()], ids=["a norm's channels", "columns of an input"])
def test_channels_far_larger_than_the_others_are_right_or_said(model: nn.Module) -> None:
    batches = [torch.randn(64, 64) for _ in range(4)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        q = static(model, batches)
    said = [str(one.message) for one in caught if issubclass(one.category, CalibrationWarning)]
    assert decibels(model(batches[0]), q(batches[0])) > 25 or any("up" in text for text in said)


class Interaction(nn.Module):
    """Dense features and products of embeddings are concatenated, as in a recommender."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.embed, self.out = nn.Linear(8, 8), nn.Linear(8, 32), nn.Linear(14, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        dense = self.dense(x).relu()
        embedded = self.embed(y).view(-1, 4, 8) * 6
        both = torch.cat([dense[:, None], embedded], 1)[:, :4]
        products = torch.bmm(both, both.transpose(1, 2))
        row, column = torch.tril_indices(4, 4, -1)
        return self.out(torch.cat([dense, products[:, row, column]], 1))


def test_producers_of_a_concatenation_keep_ranges_of_their_own() -> None:
    model = Interaction().eval()
    batches = [(torch.randn(64, 8), torch.randn(64, 8)) for _ in range(6)]
    expected = model(*batches[0])
    dynamic = decibels(expected, quant.quantize_dynamic(model)(*batches[0]))
    assert decibels(expected, static(model, batches)(*batches[0])) > dynamic - 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_a_residual_stream_is_as_exact_without_a_last_norm_as_with_one() -> None:
    found = []
    batches = [torch.randn(4, 20, 32) for _ in range(4)]
    for last in ([nn.LayerNorm(64)], []):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), *[Block() for _ in range(24)], *last, nn.Linear(64, 10)).eval()
        found.append(decibels(model(batches[0]), static(model, batches)(batches[0])))
    assert found[1] > found[0] - 3, found


def test_a_tanh_of_small_values_has_their_range() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Tanh(), nn.Conv2d(32, 32, 3), nn.Tanh(), nn.Conv2d(32, 3, 3)).eval()
    images = [torch.rand(4, 3, 24, 24) for _ in range(4)]
    assert decibels(model(images[0]), static(model, images)(images[0])) > 34.5  # 32.9 with a range of [-1, 1]


class NormAct(nn.BatchNorm2d):
    """A batch norm and its activation in one module, by the functional form."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(
            F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps)
        )


def test_a_functional_batch_norm_is_folded_like_the_module() -> None:
    image = torch.randn(2, 3, 16, 16)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), NormAct(16), nn.Conv2d(16, 16, 1), NormAct(16)).eval()
    for norm in (model[1], model[3]):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    q = static(model, [image] * 2)
    assert decibels(model(image), q(image)) > 25
    assert all(entry.outcome == "int8" for entry in quant.summary(q) if entry.bytes_before), quant.summary(q)


class WrittenAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, c))


@pytest.mark.parametrize(
    ("model", "shape"),
    [(nn.Sequential(nn.Conv2d(32, 32, 1)), (1, 32, 16, 16)), (WrittenAttention(), (2, 12, 32))],
    ids=["one 1x1 convolution", "attention written as products"],
)
def test_right_where_it_was_slow(model: nn.Module, shape: tuple[int, ...]) -> None:
    batches = [torch.randn(shape) for _ in range(3)]
    assert decibels(model(batches[0]), static(model, batches)(batches[0])) > 28
