"""Activations of 16 bits as two bytes, each of which a layer multiplies exactly.

With the scale s and zero point z of an 8-bit range, and s' = s / 254,

    high = clamp(round(x / s) + z, 0, 255)                 what 8-bit readers of the same value read
    low  = clamp(round((x - s (high - z)) / s') + 128, 0, 255)
    x   ~= s (high - z) + s' (low - 128)

Inside the range |x - s (high - z)| <= s / 2 = 127 s', so that `low` does not saturate and the error is at most s' / 2.
A layer adds its two products, each exact in int32, as float32: the sum of both would not fit int32.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 254
"""The number of steps of the low byte in one of the high byte."""

LOW_ZERO_POINT = 128
"""The zero point of the low byte."""


def low_scale(scale: float) -> float:
    """The scale of the low byte, as float32 divides."""
    return float(torch.tensor(scale, dtype=torch.float32) / STEPS)


def split(x: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of float32 x, uint8; `scale` float32 () and `zero_point` int32 (), those of the high byte."""
    high = _bytes(x, scale, zero_point)
    rest = x - (high.to(torch.int32) - zero_point).to(torch.float32) * scale
    return high, _bytes(rest, scale / STEPS, torch.full_like(zero_point, LOW_ZERO_POINT))


def rounded(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The values that the bytes of x stand for, float32."""
    high, low = split(x, scale, zero_point)
    real = (high.to(torch.int32) - zero_point).to(torch.float32) * scale
    return real + (low.to(torch.int32) - LOW_ZERO_POINT).to(torch.float32) * (scale / STEPS)


def _bytes(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return (torch.nan_to_num(torch.round(x * (1.0 / scale)), nan=0.0) + zero_point).clamp(0, 255).to(torch.uint8)
