"""The error of integers by second moments (equation R1), and integers that no single step improves."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.rounding.grid import Grid

BLOCK = 64
"""Columns whose changes all others hear of in one product."""

SWEEPS = 8
"""The largest number of times that all columns are visited; a few usually suffice."""


def output_error(target: Tensor, rounded: Tensor, hessian: Tensor) -> Tensor:
    """(v - t) H (v - t)' of each row: equation R1 without its constant.

    Args:
        target, rounded: (..., rows, K), t and v.
        hessian: (..., K, K), symmetric.

    Returns:
        (..., rows).
    """
    error = rounded - target
    return ((error @ hessian) * error).sum(-1)


def descend(
    q: Tensor, target: Tensor, scale: Tensor, hessian: Tensor, *, bits: int, zero_point: Tensor | None = None
) -> Tensor:
    """Integers from which no change of a single one lowers `output_error`, by coordinate descent.

    For one weight v_k of a row the error is a parabola around v_k - g_k / H_kk, g half its gradient, so the best
    integer is the nearest to that. Columns are visited in turn; the error never grows.

    Args:
        q: float (..., rows, K), integers to begin with, within the range.
        target: float, of the same shape.
        scale, bits, zero_point: as for `Grid.of`.
        hessian: as for `output_error`.

    Returns:
        as q. Columns whose input is always 0 stay as they are.
    """
    grid = Grid.of(q, scale, bits, zero_point)
    q, diagonal = q.clone(), hessian.diagonal(dim1=-2, dim2=-1)
    gradient = (q * grid.step - target) @ hessian  # half of it
    for _ in range(SWEEPS):
        moved = False
        for start in range(0, q.shape[-1], BLOCK):
            end = min(start + BLOCK, q.shape[-1])
            # What a column changes is heard at once by those of its block, and by the others behind the block.
            near, nearby = gradient[..., start:end].clone(), hessian[..., start:end, start:end]
            changes = torch.zeros_like(near)
            for k in range(start, end):
                own, step, slope = diagonal[..., k, None], grid.step[..., k], near[..., k - start]
                wish = q[..., k] - torch.where(own > 0, slope / (own * step), 0.0)
                best = torch.clamp(torch.round(wish), grid.bottom[..., k], grid.top[..., k])
                change = best - q[..., k]
                change = torch.where(_gains(change * step, slope, own, step), change, 0.0)
                if not bool(change.any()):
                    continue
                q[..., k] += change
                changes[..., k - start] = change * step
                near += (change * step)[..., None] * nearby[..., k - start, :].unsqueeze(-2)
            if bool(changes.any()):
                moved = True
                gradient += changes @ hessian[..., start:end, :]
        if not moved:
            break
    return q


def _gains(change: Tensor, gradient: Tensor, diagonal: Tensor, step: Tensor) -> Tensor:
    """Whether a change lowers the error by more than rounding noise, which would swing between equal integers."""
    return 2.0 * gradient * change + diagonal * change.square() < -1e-6 * diagonal * step.square()
