"""Networks for the tests of the torch-free runner, and its program as a function."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from quant.kernels import ops
from torch import Tensor, nn

import quant

needs_kernels = pytest.mark.skipif(bool(ops.extension_problem()), reason="the compiled kernels, which give these bits")
starts_python = pytest.mark.skipif(
    os.environ.get("OCTET_EMULATED") == "1", reason="minutes, emulated: the processor is QEMU_CPU's"
)
"""For tests that start a Python for each instruction set."""


class Residual(nn.Module):
    """As ResNet-18: a stem with a pool, blocks that add their input, a mean and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.convs = nn.ModuleList([nn.Conv2d(16, 16, 3, padding=1) for _ in range(2)])
        self.down, self.wide = nn.Conv2d(16, 32, 1, stride=2), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = torch.relu(x + self.convs[1](torch.relu(self.convs[0](x))))
        x = torch.relu(self.down(x) + self.wide(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Inverted(nn.Module):
    """As MobileNetV2: expansions, depthwise convolutions and ReLU6; and a gate, as MobileNetV3 has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.expand, self.depthwise, self.project = (
            nn.Conv2d(8, 48, 1),
            nn.Conv2d(48, 48, 3, 1, 1, groups=48),
            nn.Conv2d(48, 8, 1),
        )
        self.gate = nn.Conv2d(48, 48, 1)
        self.head = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.stem(x))
        y = F.relu6(self.depthwise(F.relu6(self.expand(x))))
        y = y * F.hardsigmoid(self.gate(F.adaptive_avg_pool2d(y, 1)))
        return self.head((x + self.project(y)).mean((2, 3)))


class Pyramid(nn.Module):
    """Grows and shrinks an image, joins its levels, and returns two of them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.joined, self.small = nn.Conv2d(24, 6, 3, padding=1, groups=2), nn.Conv2d(16, 4, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        fine = F.silu(self.first(image))
        coarse = F.leaky_relu(self.second(fine))
        return {
            "fine": self.joined(torch.cat([fine, F.interpolate(coarse, scale_factor=2)], 1)),
            "coarse": self.small(coarse),
        }


class UNet(nn.Module):
    """Transposed convolutions back to the sizes of before, beside what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)])
        self.norm = nn.BatchNorm2d(16)
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(32, 8, 4, 2, 1)])
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = torch.relu(self.down[0](image))
        middle = torch.relu(self.norm(self.down[1](fine)))
        x = torch.relu(self.up[0](torch.relu(self.down[2](middle))))
        x = torch.relu(self.up[1](torch.cat([x, middle], 1)))
        return self.out(torch.cat([x, fine], 1))


class Pair(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(12, 16), nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, wide: Tensor, narrow: Tensor) -> Tensor:
        return self.out(torch.relu(self.left(wide)) + torch.relu(self.right(narrow)))


def image(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


EXAMPLES = {
    "residual": (Residual, [(image(2, 3, 32, 32, seed=seed),) for seed in range(4)]),
    "inverted": (Inverted, [(image(2, 3, 32, 32, seed=seed),) for seed in range(4)]),
    "pyramid": (Pyramid, [(image(2, 3, 16, 16, seed=seed),) for seed in range(4)]),
    "unet": (UNet, [(image(2, 3, 16, 16, seed=seed),) for seed in range(4)]),
    "pair": (Pair, [(image(4, 12, seed=seed), image(4, 6, seed=seed + 9)) for seed in range(4)]),
}
"""Name -> the class, and calls to calibrate with."""

SHAPES = {
    "residual": [[(1, 3, 32, 32)], [(3, 3, 40, 56)]],
    "inverted": [[(1, 3, 32, 32)], [(5, 3, 48, 24)]],
    "pyramid": [[(1, 3, 16, 16)], [(2, 3, 12, 20)]],
    "unet": [[(1, 3, 16, 16)], [(3, 3, 24, 20)]],
    "pair": [[(1, 12), (1, 6)], [(33, 12), (33, 6)]],
}
"""Inputs, the last ones unlike those at export."""


class SmallTagger(nn.Module):
    """Words to tags, and the last states."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.words, self.states = nn.Embedding(20, 12), kind(12, 8, bidirectional=True)
        self.tags, self.has_cell = nn.Linear(16, 5), kind is nn.LSTM

    def forward(self, words: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        states, last = self.states(self.words(words), (first, first) if self.has_cell else first)
        return self.tags(states), last[1] if self.has_cell else last


AS_THEY_COME = {
    "tagger": (SmallTagger, (torch.arange(12).reshape(4, 3), torch.zeros(2, 3, 8))),
    "gru_tagger": (lambda: SmallTagger(nn.GRU), (torch.arange(12).reshape(4, 3), torch.zeros(2, 3, 8))),
}
"""Name -> the class of a network to be quantised dynamically, and its example."""


def converted(name: str) -> nn.Module:
    torch.manual_seed(3)
    kind, batches = EXAMPLES[name]
    return quant.quantize_static(kind().eval(), batches, progress=False)


def outputs_of(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """What Python gives, in the order of the runner's outputs."""
    with torch.inference_mode():
        result = model(*inputs)
    return list(result.values()) if isinstance(result, dict) else [result]


def octet_run(runner: Path, *words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """octet-run, or the one in this folder, with these arguments, under the emulator where there is one."""
    prefix = shlex.split(os.environ.get("OCTET_EMULATOR", ""))
    program = runner if runner.is_file() else runner / "octet-run"
    command = [*prefix, str(program), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def run_model(
    runner: Path, model: Path, folder: Path, inputs: Sequence[Tensor], outputs: int, *words: str, **environment: str
) -> list[Tensor]:
    """The outputs of octet-run."""
    arguments: list[str | Path] = [model, *words]
    for place, x in enumerate(inputs):
        numpy.save(folder / f"in{place}.npy", x.numpy())
        arguments += ["--input", folder / f"in{place}.npy"]
    paths = [folder / f"out{place}.npy" for place in range(outputs)]
    for path in paths:
        arguments += ["--output", path]
    done = octet_run(runner, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return [torch.from_numpy(numpy.load(path)) for path in paths]
