"""What the operators of training mean: quantise-dequantise, and its straight-through gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int | None,
    quant_min: int,
    quant_max: int,
    low: float,
    high: float,
    with_mask: bool,
) -> tuple[Tensor, Tensor]:
    """clamp(x, low, high), quantised and dequantised (equations 2 and 1), and where that let a gradient through.

    Args:
        x: float32, any shape.
        scale, zero_point: float32 and int32, () or with `axis` (channels,).
        low, high: of an activation that is part of the layer; -inf and inf where there is none.
        with_mask: also give the second result.

    Returns:
        (float32 of x's shape, bool of x's shape or empty): true where x lay between low and high and rounding, not
        clamping, decided. NaN becomes 0 and is out of range; infinities clamp.
    """
    if axis is not None:
        shape = [1] * x.dim()
        shape[axis] = -1
        scale, zero_point = scale.view(shape), zero_point.view(shape)
    q = torch.round(x.clamp(low, high) * (1.0 / scale)) + zero_point
    clamped = q.clamp(quant_min, quant_max)
    out = torch.where(torch.isnan(q), 0.0, (clamped - zero_point) * scale)
    if not with_mask:
        return out, torch.empty(0, dtype=torch.bool, device=x.device)
    return out, (clamped == q) & (x > low) & (x < high)


def masked_gradient(grad: Tensor, mask: Tensor) -> Tensor:
    """grad where mask is true, else 0 (Bengio et al. 2013, arXiv 1308.3432): the gradient that clamping lets through.

    0, not grad * mask: an infinite gradient times zero would be NaN.
    """
    return torch.where(mask, grad, 0.0)
