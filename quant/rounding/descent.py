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
    gradient = _columns((q * grid.step - target) @ hessian)  # half of it
    step, bottom, top = map(_columns, grid)
    q, diagonal = _columns(q), hessian.diagonal(dim1=-2, dim2=-1)
    for _ in range(SWEEPS):
        moved = False
        for start in range(0, q.shape[-2], BLOCK):
            end = min(start + BLOCK, q.shape[-2])
            # What a column changes is heard at once by those behind it in its block, by all others behind the block.
            near, nearby = gradient[..., start:end, :].clone(), hessian[..., start:end, start:end]
            changes = torch.zeros_like(near)
            for k in range(start, end):
                place = k - start
                own, slope = diagonal[..., k, None], near[..., place, :]
                wish = q[..., k, :] - torch.where(own > 0, slope / (own * step[..., k, :]), 0.0)
                best = torch.clamp(torch.round(wish), bottom[..., k, :], top[..., k, :])
                change = (best - q[..., k, :]) * step[..., k, :]
                gains = _gains(change, slope, own, step[..., k, :])
                if not bool(gains.any()):
                    continue
                q[..., k, :] = torch.where(gains, best, q[..., k, :])
                changes[..., place, :] = torch.where(gains, change, 0.0)
                behind = nearby[..., place, place + 1 :, None]
                near[..., place + 1 :, :] += behind * changes[..., place, None, :]
            if bool(changes.any()):
                moved = True
                gradient += hessian[..., start:end] @ changes
        if not moved:
            break
    return q.transpose(-1, -2).contiguous()


def _columns(rows: Tensor) -> Tensor:
    """(..., K, rows): each column side by side in memory, as columns are visited one by one."""
    return rows.transpose(-1, -2).contiguous()


def _gains(change: Tensor, gradient: Tensor, diagonal: Tensor, step: Tensor) -> Tensor:
    """Whether a change lowers the error by more than rounding noise, which would swing between equal integers."""
    return 2.0 * gradient * change + diagonal * change.square() < -1e-6 * diagonal * step.square()
