"""Small copies of networks that people quantise, each whole: every weighted layer in int8, near float."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.convert import convert
from quant.parity import parity
from quant.prepare import prepare
from quant.recipe import QConfig, Recipe
from quant.report import summary
from quant.runtime.trees import leaves

RECIPE = Recipe(default=QConfig(activation_observer="minmax"))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.adaptive_avg_pool2d(x, 1)
        return x * F.hardsigmoid(self.expand(F.relu(self.reduce(gate))))


class MobileNetV3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish())
        self.depthwise = nn.Sequential(
            nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.Hardswish()
        )
        self.excite = SqueezeExcite(8)
        self.project = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.classifier = nn.Sequential(nn.Linear(8, 16), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.project(self.excite(self.depthwise(x)))
        return self.classifier(x.mean([2, 3]))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge, self.out = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down1(x))
        two = F.relu(self.down2(F.max_pool2d(one, 2)))
        up = self.up(two)
        if up.shape[2:] != one.shape[2:]:
            up = F.interpolate(up, size=one.shape[2:], mode="bilinear", align_corners=False)
        return torch.sigmoid(self.out(F.relu(self.merge(torch.cat([one, up], dim=1)))))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8 + 4 * i) for i in range(3)])
        self.convs = nn.ModuleList([nn.Conv2d(8 + 4 * i, 4, 3, padding=1) for i in range(3)])
        self.fc = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)))))
        return self.fc(F.adaptive_avg_pool2d(F.relu(torch.cat(features, 1)), (1, 1)).flatten(1))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, dim))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 17, 16) * 0.02)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = Attention(16, 2)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(x[:, 0])


class Pyramid(nn.Module):
    """Several outputs, and a head that every level shares."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([nn.Conv2d(3 if i == 0 else 8, 8, 3, 2, 1) for i in range(3)])
        self.lateral = nn.ModuleList([nn.Conv2d(8, 8, 1) for _ in range(3)])
        self.head = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 1))

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        features = []
        for level in self.levels:
            x = F.relu(level(x))
            features.append(x)
        merged = [self.lateral[2](features[2])]
        for i in (1, 0):
            up = F.interpolate(merged[0], scale_factor=2.0, mode="nearest")
            merged.insert(0, self.lateral[i](features[i]) + up)
        return {"boxes": [self.head(level) for level in merged], "features": merged}


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 1)
        self.filters = nn.ModuleList([nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3)])
        self.skips = nn.ModuleList([nn.Conv1d(8, 8, 1) for _ in range(3)])
        self.last = nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total = torch.zeros_like(x)
        for i, (filters, skip) in enumerate(zip(self.filters, self.skips, strict=True)):
            gate, signal = filters(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            y = skip(torch.sigmoid(gate) * torch.tanh(signal))
            total = total + y
            x = x + y
        return self.last(F.leaky_relu(total, 0.1))


ZOO = {
    "mobilenet v3": (MobileNetV3, (4, 3, 16, 16), 20),
    "u-net": (UNet, (2, 3, 16, 16), 30),
    "densenet": (DenseNet, (4, 3, 8, 8), 25),
    "vit": (ViT, (4, 3, 16, 16), 25),
    "pyramid": (Pyramid, (2, 3, 32, 32), 20),
    "wavenet": (WaveNet, (2, 1, 50), 25),
}


@pytest.mark.parametrize(("kind", "shape", "sqnr"), ZOO.values(), ids=list(ZOO))
def test_network(kind: type[nn.Module], shape: tuple[int, ...], sqnr: float) -> None:
    torch.manual_seed(0)
    model = kind()
    with torch.no_grad():
        model.train()(torch.randn(shape))
        model.eval()
        x: Any = torch.randn(shape)
        expected = model(x)
        prepared = prepare(model, x, RECIPE)
        for one, other in zip(leaves(expected), leaves(prepared(x)), strict=True):
            assert torch.allclose(one, other, atol=1e-5)
        converted = convert(prepared)
        got = converted(x)
    for step in parity(prepared, converted, [x]):
        assert step.holds, step
    for one, other in zip(leaves(expected), leaves(got), strict=True):
        assert float(10 * torch.log10(one.pow(2).sum() / (one - other).pow(2).sum())) > sqnr
    weighted = (nn.Linear, nn.modules.conv._ConvNd)
    names = [name for name, module in model.named_modules() if isinstance(module, weighted)]
    report = summary(converted)
    assert [name for name in names if report[name].outcome == "float"] == []
    assert torch.isfinite(next(iter(leaves(converted(x[:1]))))).all()
