"""The values that a weight's integers may stand for: step, lowest and highest integer of each weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """weight ~ step * q with bottom <= q <= top; each of the weight's shape, perhaps as a view.

    Attributes:
        step: positive.
        bottom, top: whole numbers.
    """

    step: Tensor
    bottom: Tensor
    top: Tensor

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor, bits: int, zero_point: Tensor | None = None) -> Grid:
        """The grid of a weight (..., rows, K).

        Args:
            scale: (..., rows); or (..., rows, groups), for K / groups neighbouring columns each.
            bits: 2 to 8.
            zero_point: of the scale's shape, in [0, 2**bits): q is then the stored integer less its zero point. None
                for the symmetric range [-(2**(bits-1)-1), 2**(bits-1)-1].
        """
        if zero_point is None:
            top = weight.new_tensor(2 ** (bits - 1) - 1)
            return cls(_by_weight(scale, weight), -top.expand_as(weight), top.expand_as(weight))
        zero = _by_weight(zero_point.to(weight.dtype), weight)
        return cls(_by_weight(scale, weight), -zero, 2**bits - 1 - zero)

    def nearest(self, weight: Tensor) -> Tensor:
        """The integers of rounding to nearest."""
        return self.clamped(torch.round(weight / self.step))

    def clamped(self, q: Tensor) -> Tensor:
        """Integers within the range."""
        return torch.clamp(q, self.bottom, self.top)


def _by_weight(one: Tensor, weight: Tensor) -> Tensor:
    """A number of each row, or of each group of a row, for each weight."""
    if one.dim() == weight.dim() - 1:
        return one[..., None].expand_as(weight)
    return one.repeat_interleave(weight.shape[-1] // one.shape[-1], dim=-1)
