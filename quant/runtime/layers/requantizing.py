"""The integers beside a layer's products: its bias, and the ends that a clamp leaves of its output."""

from __future__ import annotations

import torch
from torch import Tensor

BIAS_LIMIT = 2**30
"""Largest quantised bias: as much again fits beside it in int32."""


def quantized_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """int32 at scale s_x * s_w, (out,)."""
    return torch.round(bias.double() / scale.double()).clamp(-BIAS_LIMIT, BIAS_LIMIT).to(torch.int32)


def clamp_limits(clamp: tuple[float, float] | None, scale: float, zero_point: int) -> tuple[int, int]:
    """The integers that a clamp of real values leaves, so that it costs nothing on top of requantising."""
    if clamp is None:
        return 0, 255
    ends = torch.tensor(clamp, dtype=torch.float32)
    inverse = 1.0 / torch.tensor(scale, dtype=torch.float32)
    low, high = (torch.round(ends * inverse) + zero_point).clamp(0, 255).tolist()
    return int(low), int(high)
