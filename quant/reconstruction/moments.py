"""The second moments of a layer's input, as rows of the product that the layer is (equation R1 of `quant/rounding/`).

A convolution is that product of each window with the weight; with groups it is as many products, each with its own
moments. Windows of neighbouring places say much the same, so of large images some lines are taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quant.ops.conv import Conv, ConvTranspose
from quant.ops.linear import Linear
from quant.ops.step import Step

MOST_PLACES = 1024
"""Places of an image whose windows are taken, about."""


def has_rows(step: Step) -> bool:
    """Whether the step is a product of rows with its weight: linear layers and convolutions, not transposed."""
    return isinstance(step.operator, (Linear, Conv)) and not isinstance(step.operator, ConvTranspose)


def groups_of(step: Step) -> int:
    """How many products a weighted step consists of."""
    return step.operator.groups if isinstance(step.operator, Conv) else 1


def input_rows(step: Step, x: Tensor, kernel: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
    """The rows that a step multiplies with its weight: (groups, rows, K), K = inputs of a group times kernel.

    Args:
        x: the step's input.
        kernel: the weight's shape behind its channels; () of a linear layer.
        generator: draws the lines of a large image; None takes all.
    """
    if not kernel:
        return x.reshape(1, -1, x.shape[-1])
    conv = step.operator
    assert isinstance(conv, Conv)
    x = F.pad(conv.padded(x), [width for padding in reversed(conv.padding) for width in (padding, padding)])
    dims = len(kernel)
    for axis, (size, stride, dilation) in enumerate(zip(kernel, conv.stride, conv.dilation, strict=True), 2):
        x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    if generator is not None:
        x = x.index_select(2, _lines(x.shape[2 : 2 + dims], generator))
    samples, channels = x.shape[:2]
    x = x.reshape(samples, conv.groups, channels // conv.groups, *x.shape[2:])
    places = list(range(3, 3 + dims))
    windows = x.permute(1, 0, *places, 2, *range(3 + dims, 3 + 2 * dims))
    return windows.reshape(conv.groups, -1, channels // conv.groups * int(torch.tensor(kernel).prod()))


def _lines(places: torch.Size, generator: torch.Generator) -> Tensor:
    """Which lines (indices of the first axis) to take, in order."""
    lines = places[0]
    wanted = max(1, -(-MOST_PLACES * lines // max(places.numel(), 1)))
    if wanted >= lines:
        return torch.arange(lines)
    return torch.randperm(lines, generator=generator)[:wanted].sort().values


@dataclass
class Moments:
    """Sums over rows x' that a layer gets, beside the rows x of the float model.

    Attributes:
        rows: their number.
        hessian, cross: sums of x' x'' and x x'', float64 (groups, K, K).
        sums, real_sums: of x' and x, float64 (groups, K).
    """

    rows: int
    hessian: Tensor
    cross: Tensor
    sums: Tensor
    real_sums: Tensor

    @classmethod
    def empty(cls, groups: int, columns: int) -> Moments:
        """Of no rows."""
        square = torch.zeros(groups, columns, columns, dtype=torch.float64)
        line = torch.zeros(groups, columns, dtype=torch.float64)
        return cls(0, square, square.clone(), line, line.clone())

    def add(self, rows: Tensor, real: Tensor) -> None:
        """Add rows (groups, rows, K) and those of the float model; rows that are not finite in either are left out."""
        sound = (torch.isfinite(rows) & torch.isfinite(real)).all(2).all(0)
        if not bool(sound.all()):
            rows, real = rows[:, sound], real[:, sound]
        transposed = rows.transpose(1, 2)
        self.hessian += transposed @ rows
        self.cross += real.transpose(1, 2) @ rows
        self.sums += rows.sum(1, dtype=torch.float64)
        self.real_sums += real.sum(1, dtype=torch.float64)
        self.rows += rows.shape[1]

    def means(self) -> tuple[Tensor, Tensor]:
        """The mean rows x' and x, float32 (groups, K)."""
        return (self.sums / self.rows).float(), (self.real_sums / self.rows).float()

    def centered(self) -> tuple[Tensor, Tensor]:
        """H and C less the products of means, for a layer whose bias takes the mean error; float32 (groups, K, K)."""
        own, real = self.sums / self.rows, self.real_sums / self.rows
        hessian, cross = (self.hessian / self.rows, self.cross / self.rows)
        hessian = hessian - own[:, :, None] * own[:, None, :]
        return hessian.float(), (cross - real[:, :, None] * own[:, None, :]).float()

    def plain(self) -> tuple[Tensor, Tensor]:
        """H and C, float32 (groups, K, K)."""
        return (self.hessian / self.rows).float(), (self.cross / self.rows).float()
