"""A layer's bias and clamp as integers."""

from __future__ import annotations

import torch
from torch import Tensor

BIAS_LIMIT = 2**30
"""Largest quantised bias: half of int32's range, so that the products have the other half."""


def quantized_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """The bias as int32, (out,), at scale s_x * s_w."""
    return torch.round(bias.double() / scale.double()).clamp(-BIAS_LIMIT, BIAS_LIMIT).to(torch.int32)


def clamp_limits(clamp: tuple[float, float] | None, scale: float, zero_point: int) -> tuple[int, int]:
    """A clamp of real values as bounds of uint8, which requantising applies at no cost."""
    if clamp is None:
        return 0, 255
    ends = torch.tensor(clamp, dtype=torch.float32)
    inverse = 1.0 / torch.tensor(scale, dtype=torch.float32)
    low, high = (torch.round(ends * inverse) + zero_point).clamp(0, 255).tolist()
    return int(low), int(high)
