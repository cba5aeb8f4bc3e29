"""Two networks with squeeze-and-excitation for 28 x 28 grey images, trained on Fashion-MNIST and kept in the cache.

MobileNetV3-small's blocks (Howard et al., arXiv:1905.02244, table 2: hard-swish, and a gate by hard-sigmoid) and those
of EfficientNet-B0 (Tan & Le, arXiv:1905.11946, table 1: SiLU, and a gate by sigmoid), with fewer repetitions and
strides, as the images are small. Of the published networks these lose most by rounding after training.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"
sys.path.insert(0, str(TUTORIALS))

from train_fashion import fit  # noqa: E402 - behind the path of the tutorials
from zoo import fashion  # noqa: E402
from zoo.fetch import cache_root  # noqa: E402

EPOCHS, IMAGES = 2, 24_000
"""Training is short: a network takes some minutes on one core, and what rounding loses shows all the same."""


class SqueezeExcite(nn.Module):
    """A gate per channel from the means of all channels (Hu et al., arXiv:1709.01507)."""

    def __init__(self, channels: int, squeezed: int, gate: nn.Module) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze, self.excite = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.relu, self.gate = nn.ReLU(), gate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.excite(self.relu(self.squeeze(self.pool(x)))))


class InvertedResidual(nn.Module):
    """1 x 1 to more channels, a depthwise convolution, a gate, and 1 x 1 back (MBConv)."""

    def __init__(
        self,
        channels: tuple[int, int, int],
        kernel: int,
        stride: int,
        activation: Callable[[], nn.Module],
        gate: Callable[[], nn.Module] | None,
    ) -> None:
        super().__init__()
        before, wide, after = channels
        self.expand = nn.Conv2d(before, wide, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(wide)
        self.depthwise = nn.Conv2d(wide, wide, kernel, stride, padding=kernel // 2, groups=wide, bias=False)
        self.norm2 = nn.BatchNorm2d(wide)
        self.gate: nn.Module = nn.Identity() if gate is None else SqueezeExcite(wide, max(8, wide // 4), gate())
        self.project = nn.Conv2d(wide, after, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(after)
        self.act1, self.act2 = activation(), activation()
        self.residual = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.norm1(self.expand(x)))
        y = self.gate(self.act2(self.norm2(self.depthwise(y))))
        y = self.norm3(self.project(y))
        return x + y if self.residual else y


class MobileNetwork(nn.Module):
    """float32 (N, 1, 28, 28) -> (N, 10): a stem, inverted residuals, and a head."""

    def __init__(self, blocks: list[InvertedResidual], head: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        first, last = blocks[0].expand.in_channels, blocks[-1].project.out_channels
        stem = nn.Conv2d(1, first, 3, 2, padding=1, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(first), activation())
        self.blocks = nn.Sequential(*blocks)
        self.top = nn.Sequential(nn.Conv2d(last, head, 1, bias=False), nn.BatchNorm2d(head), activation())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(head, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.top(self.blocks(self.stem(x)))).flatten(1))


def mobilenet_v3() -> MobileNetwork:
    """MobileNetV3-small-like."""
    rows = [
        ((16, 16, 16), 3, 2, nn.ReLU, True),
        ((16, 72, 24), 3, 1, nn.ReLU, False),
        ((24, 88, 24), 3, 1, nn.ReLU, False),
        ((24, 96, 40), 5, 2, nn.Hardswish, True),
        ((40, 240, 40), 5, 1, nn.Hardswish, True),
        ((40, 120, 48), 5, 1, nn.Hardswish, True),
        ((48, 144, 48), 5, 1, nn.Hardswish, True),
        ((48, 288, 96), 5, 1, nn.Hardswish, True),
    ]
    blocks = [InvertedResidual(c, k, s, act, nn.Hardsigmoid if gated else None) for c, k, s, act, gated in rows]
    return MobileNetwork(blocks, 288, nn.Hardswish)


def efficientnet_b0() -> MobileNetwork:
    """EfficientNet-B0-like."""
    rows = [
        ((16, 16, 16), 3, 1),
        ((16, 96, 24), 3, 2),
        ((24, 144, 24), 3, 1),
        ((24, 144, 40), 5, 2),
        ((40, 240, 40), 5, 1),
        ((40, 240, 80), 3, 1),
        ((80, 320, 80), 5, 1),
        ((80, 320, 96), 3, 1),
    ]
    blocks = [InvertedResidual(c, k, s, nn.SiLU, nn.Sigmoid) for c, k, s in rows]
    return MobileNetwork(blocks, 320, nn.SiLU)


NETWORKS: dict[str, Callable[[], MobileNetwork]] = {"mobilenet_v3": mobilenet_v3, "efficientnet_b0": efficientnet_b0}


def trained(name: str, *, seed: int = 0, epochs: int = EPOCHS) -> nn.Module:
    """The network of that name in eval mode, trained now where no earlier run has left its weights."""
    torch.manual_seed(seed)
    model = NETWORKS[name]()
    classes = (SqueezeExcite, InvertedResidual, MobileNetwork)
    code = f"{model}{''.join(map(inspect.getsource, classes))}{(TUTORIALS / 'train_fashion.py').read_text()}"
    made_by = hashlib.sha256(code.encode()).hexdigest()[:12]
    path = cache_root().parent / "trained" / f"fashion-{name}-seed{seed}-{epochs}x{IMAGES}-{made_by}.safetensors"
    if path.is_file():
        model.load_state_dict(load_file(path))
        return model.eval()
    images, classes = (data[:IMAGES] for data in fashion.load("train"))
    fit(model, images, classes, epochs=epochs, learning_rate=0.003, seed=seed, progress=name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, made)
        os.replace(made, path)
    return model.eval()
