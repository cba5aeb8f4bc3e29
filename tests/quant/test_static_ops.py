"""Every operator of static int8 inside a small network: recognised, within one step of its simulation, near float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.convert import convert
from quant.parity import parity
from quant.prepare import prepare
from quant.recipe import QConfig, Recipe
from quant.static.runner import runners

RECIPE = Recipe(default=QConfig(activation_observer="minmax"))


class Between(nn.Module):
    """A convolution, then what is tested, then as many convolutions as it gives tensors."""

    def __init__(self, middle: Callable[..., Any], channels: int = 4, dims: int = 2) -> None:
        super().__init__()
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.before = conv(3, 4, 1)
        self.middle = middle
        self.after = conv(channels, 2, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.middle(self.before(x))
        return [self.after(part) for part in y] if isinstance(y, (tuple, list)) else self.after(y)


def run(model: nn.Module, x: Tensor, op: str | None, sqnr: float) -> None:
    model.eval()
    with torch.no_grad():
        expected = model(x)
    prepared = prepare(model, x, RECIPE)
    steps = runners(prepared)[""].fused.steps
    if op is not None:
        assert op in [step.operator.name for step in steps], [
            (step.name, step.operator.name, step.reason) for step in steps
        ]
    prepared(x)
    converted = convert(prepared)
    got = converted(x)
    for step in parity(prepared, converted, [x]):
        assert step.holds, step
    pairs = zip(expected, got, strict=True) if isinstance(expected, list) else [(expected, got)]
    for one, other in pairs:
        assert one.shape == other.shape
        assert float(10 * torch.log10(one.pow(2).sum() / (one - other).pow(2).sum())) > sqnr


MODULES = {
    "relu": (nn.ReLU(), "conv"),
    "relu6": (nn.ReLU6(), "conv"),
    "hardtanh": (nn.Hardtanh(-0.5, 0.5), "conv"),
    "hardtanh off zero": (nn.Hardtanh(0.1, 0.5), "lookup"),
    "hardswish": (nn.Hardswish(), "lookup"),
    "hardsigmoid": (nn.Hardsigmoid(), "lookup"),
    "leaky relu": (nn.LeakyReLU(0.2), "lookup"),
    "silu": (nn.SiLU(), "lookup"),
    "gelu": (nn.GELU(), "lookup"),
    "gelu tanh": (nn.GELU(approximate="tanh"), "lookup"),
    "sigmoid": (nn.Sigmoid(), "lookup"),
    "tanh": (nn.Tanh(), "lookup"),
    "elu": (nn.ELU(), "lookup"),
    "prelu": (nn.PReLU(init=0.1), "lookup"),
    "prelu per channel": (nn.PReLU(4), "lookup"),
    "softplus": (nn.Softplus(), "lookup"),
    "mish": (nn.Mish(), "lookup"),
    "batch norm, its conv read twice": (nn.BatchNorm2d(4), "conv"),
    "max pool": (nn.MaxPool2d(3, 2, 1), "max_pool"),
    "max pool ceil": (nn.MaxPool2d(2, ceil_mode=True), "max_pool"),
    "avg pool": (nn.AvgPool2d(3, 2, 1), "avg_pool"),
    "avg pool without padding": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), "avg_pool"),
    "adaptive avg pool": (nn.AdaptiveAvgPool2d((3, None)), "adaptive_avg_pool"),
    "adaptive max pool": (nn.AdaptiveMaxPool2d(2), "adaptive_max_pool"),
    "dropout": (nn.Dropout2d(0.5), "pass"),
    "identity": (nn.Identity(), None),
    "upsample": (nn.Upsample(scale_factor=2), "interpolate"),
    "upsample bilinear": (nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), "interpolate"),
    "zero pad": (nn.ZeroPad2d((1, 2, 0, 3)), "pad"),
    "reflection pad": (nn.ReflectionPad2d(1), "pad"),
    "replication pad": (nn.ReplicationPad2d((1, 0, 2, 1)), "pad"),
    "circular pad": (nn.CircularPad2d(1), "pad"),
    "softmax": (nn.Softmax(dim=1), None),
    "layer norm": (nn.LayerNorm([4, 9, 9]), None),
    "group norm": (nn.GroupNorm(2, 4), None),
    "instance norm": (nn.InstanceNorm2d(4), None),
}


@pytest.mark.parametrize(("middle", "op"), MODULES.values(), ids=list(MODULES))
def test_module(middle: nn.Module, op: str | None) -> None:
    torch.manual_seed(0)
    run(Between(middle), torch.randn(4, 3, 9, 9), op, 25.0)


FUNCTIONS: dict[str, tuple[Callable[..., Any], int, str | None]] = {
    "functional relu": (F.relu, 4, "conv"),
    "clamp": (lambda x: x.clamp(-0.3, 0.7), 4, "conv"),
    "in-place relu": (lambda x: F.relu(x, inplace=True), 4, "conv"),
    "relu_": (lambda x: x.relu_(), 4, "conv"),
    "sigmoid": (torch.sigmoid, 4, "lookup"),
    "gate": (lambda x: x * torch.sigmoid(x), 4, "mul"),
    "times a number": (lambda x: 2.0 * x - 0.5, 4, "lookup"),
    "over a number": (lambda x: x / 3, 4, "lookup"),
    "add": (lambda x: x + F.hardswish(x), 4, "add"),
    "add relu": (lambda x: torch.relu(x + F.hardswish(x)), 4, "add"),
    "subtract": (lambda x: x - F.hardswish(x), 4, "add"),
    "broadcast": (lambda x: x * x.mean((2, 3), keepdim=True), 4, "mean"),
    "cat": (lambda x: torch.cat([x, F.relu(x), x], 1), 12, "cat"),
    "chunk": (lambda x: x.chunk(2, 1), 2, "pass"),
    "split": (lambda x: torch.split(x, [2, 2], dim=1), 2, "pass"),
    "chunk cat": (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), 4, "cat"),
    "index": (lambda x: x[:, ::2, 1:-1], 2, "pass"),
    "reshape": (lambda x: x.reshape(x.shape[0], 2, 2, *x.shape[2:]).transpose(1, 2).flatten(1, 2), 4, "pass"),
    "view": (lambda x: x.view(x.size(0), 4, -1, 1), 4, "pass"),
    "permute": (lambda x: x.permute(0, 1, 3, 2).contiguous(), 4, "pass"),
    "max pool": (lambda x: F.max_pool2d(x, 2), 4, "max_pool"),
    "avg pool": (lambda x: F.avg_pool2d(x, 3, stride=1, padding=1), 4, "avg_pool"),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, 3), 4, "adaptive_avg_pool"),
    "pad": (lambda x: F.pad(x, (1, 1)), 4, "pad"),
    "pad reflect": (lambda x: F.pad(x, (1, 1, 2, 0), mode="reflect"), 4, "pad"),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), 4, "interpolate"),
    "interpolate to a size": (lambda x: F.interpolate(x[:, :, ::2], size=x.shape[2:]), 4, "interpolate"),
    "dropout": (lambda x: F.dropout(x, 0.3, training=False), 4, "pass"),
    "matmul": (lambda x: x @ x.transpose(2, 3), 4, "matmul"),
    "channel shuffle": (nn.ChannelShuffle(2), 4, "pass"),
    "square": (lambda x: x**2, 4, None),
    "square root": (lambda x: torch.sqrt(x.abs() + 1), 4, None),
    "log": (lambda x: torch.log(x.abs() + 1), 4, None),
    "division": (lambda x: x / (x.abs() + 1), 4, None),
    "softmax": (lambda x: F.softmax(x, dim=1), 4, None),
    "constant": (lambda x: x + torch.ones(4, 1, 1), 4, None),
    "made from a size": (lambda x: x + torch.zeros(x.shape[0], 4, 1, 1), 4, None),
    "norm by batch": (lambda x: x - x.mean(0, keepdim=True), 4, "mean"),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), 4, None),
}


@pytest.mark.parametrize(("middle", "channels", "op"), FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_function(middle: Callable[..., Any], channels: int, op: str | None) -> None:
    torch.manual_seed(0)
    run(Between(middle, channels), torch.randn(4, 3, 9, 9), op, 22.0)


LAYERS = {
    "conv1d": (nn.Conv1d(3, 4, 3, padding=1), 1),
    "conv2d strided dilated": (nn.Conv2d(3, 4, 3, stride=2, dilation=2, padding=(2, 1)), 2),
    "conv2d same": (nn.Conv2d(3, 4, (3, 4), padding="same"), 2),
    "conv2d circular": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), 2),
    "conv2d reflect": (nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="reflect"), 2),
    "conv2d no bias": (nn.Conv2d(3, 4, 3, bias=False), 2),
    "conv2d grouped": (nn.Conv2d(3, 6, 3, groups=3), 2),
    "conv3d": (nn.Conv3d(3, 4, 3, padding=1), 3),
    "transposed 1d": (nn.ConvTranspose1d(3, 4, 3, stride=2, output_padding=1), 1),
    "transposed 2d": (nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), 2),
    "transposed 2d grouped": (nn.ConvTranspose2d(3, 6, 3, groups=3, dilation=2), 2),
    "transposed 3d": (nn.ConvTranspose3d(3, 4, 2, stride=2), 3),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("norm", [False, True], ids=["alone", "with batch norm"])
@pytest.mark.parametrize(("layer", "dims"), LAYERS.values(), ids=list(LAYERS))
def test_layer(layer: Any, dims: int, norm: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, *[9] * dims)
    norms: Any = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](layer.out_channels)
    norms.running_var.uniform_(0.5, 2)
    norms.running_mean.normal_(0, 0.2)
    norms.weight.data.uniform_(0.5, 2)
    last = nn.Flatten()
    model = nn.Sequential(layer, norms, nn.ReLU(), last) if norm else nn.Sequential(layer, nn.ReLU(), last)
    model.append(nn.Linear(model.eval()(x).shape[1], 3))
    run(model, x, "conv_transpose" if layer.transposed else "conv", 25.0)


def test_linear_batch_norm_is_folded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    run(model, torch.randn(16, 8), "linear", 25.0)


def test_batch_norm_before_its_layer_is_a_look_up() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    run(model, torch.randn(2, 3, 8, 8), "lookup", 25.0)
