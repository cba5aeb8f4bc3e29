"""Float networks with the layers and shapes of the published ones, and random weights: what time depends on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def conv_norm(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, act: nn.Module | None = None
) -> nn.Sequential:
    """Convolution that keeps the size but for its stride, batch norm, and `act`."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    layers: list[nn.Module] = [conv, nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, *([act] if act is not None else []))


class BasicBlock(nn.Module):
    """Of ResNet-18 (He et al. 2015, arXiv 1512.03385, figure 5, left)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv_norm(inputs, outputs, 3, stride, act=nn.ReLU(inplace=True)), conv_norm(outputs, outputs, 3)
        )
        self.shortcut = nn.Identity() if stride == 1 else conv_norm(inputs, outputs, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


class ResNet18(nn.Module):
    """He et al. 2015, table 1: 1.8 GMAC at 224 x 224."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 64, 7, 2, act=nn.ReLU(inplace=True)), nn.MaxPool2d(3, 2, 1))
        widths = (64, 64, 128, 256, 512)
        blocks = []
        for inputs, outputs in itertools.pairwise(widths):
            blocks += [BasicBlock(inputs, outputs, 1 if inputs == outputs else 2), BasicBlock(outputs, outputs, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.blocks(self.stem(x))).flatten(1))


class Bottleneck(nn.Module):
    """Of ResNet-50 (He et al. 2015, figure 5, right), with the stride in the 3 x 3 convolution as in torchvision."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv_norm(inputs, width, 1, act=nn.ReLU(inplace=True)),
            conv_norm(width, width, 3, stride, act=nn.ReLU(inplace=True)),
            conv_norm(width, 4 * width, 1),
        )
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else conv_norm(inputs, 4 * width, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """He et al. 2015, table 1: 4.1 GMAC at 224 x 224."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 64, 7, 2, act=nn.ReLU(inplace=True)), nn.MaxPool2d(3, 2, 1))
        blocks, inputs = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(count):
                blocks.append(Bottleneck(inputs, width, stride if index == 0 else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(2048, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.blocks(self.stem(x))).flatten(1))


class InvertedResidual(nn.Module):
    """Of MobileNetV2 (Sandler et al. 2018, arXiv 1801.04381, table 1)."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = inputs * expand
        layers = [conv_norm(inputs, inner, 1, act=nn.ReLU6(inplace=True))] if expand > 1 else []
        layers.append(conv_norm(inner, inner, 3, stride, groups=inner, act=nn.ReLU6(inplace=True)))
        self.body = nn.Sequential(*layers, conv_norm(inner, outputs, 1))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class MobileNetV2(nn.Module):
    """Sandler et al. 2018, table 2: 0.3 GMAC at 224 x 224."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm(3, 32, 3, 2, act=nn.ReLU6(inplace=True))]
        width = 32
        for expand, outputs, count, stride in (
            (1, 16, 1, 1),
            (6, 24, 2, 2),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        ):
            for index in range(count):
                layers.append(InvertedResidual(width, outputs, stride if index == 0 else 1, expand))
                width = outputs
        self.features = nn.Sequential(*layers, conv_norm(width, 1280, 1, act=nn.ReLU6(inplace=True)))
        self.pool, self.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


class BertLayer(nn.Module):
    """Of BERT-base (Devlin et al. 2018, arXiv 1810.04805): 12 heads of 64, 3072 wide inside."""

    def __init__(self, width: int = 768, heads: int = 12, inner: int = 3072) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.body = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.norm_after = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        x = self.norm(x + self.out(seen.transpose(1, 2).flatten(2)))
        return self.norm_after(x + self.body(x))


class Bert(nn.Module):
    """Of the shapes of MiniLM-L6-H384 (Wang et al. 2020, arXiv 2002.10957), with its masks and a smaller vocabulary."""

    def __init__(self, layers: int = 6, width: int = 384, vocabulary: int = 8000) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(MaskedLayer(width, 12, 4 * width) for _ in range(layers))
        self.pooler = nn.Linear(width, width)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.places(places))
        added = (1.0 - mask[:, None, None, :].float()) * -10000.0
        for layer in self.layers:
            x = layer(x, added)
        return torch.tanh(self.pooler(x[:, 0]))


class MaskedLayer(BertLayer):
    """With a mask that is added to the scores."""

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        seen = (scores + added).softmax(-1) @ value
        x = self.norm(x + self.out(seen.transpose(1, 2).flatten(2)))
        return self.norm_after(x + self.body(x))


def settle_norms(model: nn.Module, batches: Sequence[Tensor]) -> nn.Module:
    """Batch norms get the statistics of data, as training leaves them; with those of initialisation the values of a
    deep network grow or vanish, and errors would mean nothing."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # a plain average over the batches
    model.train()
    with torch.no_grad():
        for batch in batches:
            model(batch)
    return model.eval()


NETWORKS: dict[str, type[nn.Module]] = {"ResNet-18": ResNet18, "MobileNetV2": MobileNetV2}
"""Those of the benchmarks of convolutions and of calibration."""
