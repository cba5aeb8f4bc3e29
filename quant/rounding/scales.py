"""The scale of a weight's row with the least error of the layer's output, by the second moments of its inputs.

A weight's rounding error reaches the output times its input. With inputs that do not correlate, the mean square error
of an output is sum_k E[x_k**2] (w_k - q(w_k))**2: the diagonal of equation R1. Of few bits the best step is finer
than one that holds a row's largest weight, and which weights may be clipped depends on what they are multiplied by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.kernels.scheme import SCALE_MIN, weight_scale

COARSE = 2.0 ** (-torch.arange(0, 25) / 8)
"""Shares of the range of a row's largest weight that are tried first: 1 down to 1/8, each 8 % below the one before."""

FINE = torch.linspace(1.08, 0.93, 16)
"""Factors tried around the best coarse share, one coarse step to either side."""


def least_error_scale(rows: Tensor, importance: Tensor | None = None, *, bits: int) -> Tensor:
    """The symmetric scale of each row with the least weighted square error among those tried.

    Args:
        rows: float32 (rows, K).
        importance: float32, broadcast to (rows, K), E[x_k**2] of the inputs, not negative; None counts all alike. A row
            whose inputs are all 0 has the scale of its largest weight.
        bits: 2 to 8.

    Returns:
        float32 (rows,), at most `weight_scale` of the row, which is itself the first candidate: of equals, the largest.
        A row with NaN or inf has such a scale.
    """
    widest = weight_scale(rows, bits=bits)
    if rows.shape[1] == 0:
        return widest
    by = torch.ones(1, 1) if importance is None else importance.to(torch.float32)
    share, error = torch.ones_like(widest), torch.full_like(widest, torch.inf)
    for factors in (COARSE, FINE):
        around = share
        for factor in factors.tolist():
            tried = (around * factor).clamp(max=1.0)
            own = _error(rows, (widest * tried).clamp(min=SCALE_MIN), by, bits)
            better = own < error
            share, error = torch.where(better, tried, share), torch.where(better, own, error)
    return torch.where(torch.isfinite(error) & (error > 0), (widest * share).clamp(min=SCALE_MIN), widest)


def _error(rows: Tensor, scale: Tensor, importance: Tensor, bits: int) -> Tensor:
    """The weighted square error of each row, float32 (rows,)."""
    top = 2 ** (bits - 1) - 1
    by_row = scale[:, None]
    q = torch.round(rows * (1.0 / by_row)).clamp_(-top, top)
    return q.mul_(by_row).sub_(rows).square_().mul(importance).sum(1)
