"""The scale of a weight's row by what rounding does to the layer's output, by the second moments of its inputs.

Of few bits the best step is finer than one that holds a row's largest weight, and which weights may be clipped depends
on what they are multiplied by. `scale_by_output` looks at all of equation R1, `least_error_scale` at its diagonal, as
GPTQ does for a group of columns whose turn comes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quant.kernels.narrow import HALF_MIN, in_half
from quant.kernels.scheme import SCALE_MIN, affine_qparams, weight_scale
from quant.rounding.descent import output_error

COARSE = 2.0 ** (-torch.arange(0, 25) / 8)
"""Shares of the range of a row's largest weight that are tried first: 1 down to 1/8, each 8 % below the one before."""

FINE = torch.linspace(1.08, 0.93, 16)
"""Factors tried around the best coarse share, one coarse step to either side."""


FEW_BITS = 4
"""The most bits of weights whose scales follow from the output; of more, the largest weight sets them well."""

SHARES = 2.0 ** (-torch.arange(0, 13) / 8)
"""Shares of the range of a row's largest weight that `scale_by_output` tries: 1 down to 0.35."""

FARTHEST = 1.5
"""The factor by which a scale may change once its integers are chosen."""


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
    share, error = _least(widest, lambda share: _error(rows, (widest * share).clamp(min=SCALE_MIN), by, bits))
    return torch.where(torch.isfinite(error) & (error > 0), (widest * share).clamp(min=SCALE_MIN), widest)


def least_error_shares(groups: Tensor, *, bits: int, symmetric: bool) -> Tensor:
    """The share of each group's range with the least square error of its values, stored as `quant.kernels.narrow` does.

    Args:
        groups: float32 (N, groups, size).
        bits: 2 to 4.
        symmetric: integers of ±(2**(bits - 1) - 1) around 0; else all 2**bits, from the minimum to the maximum, both of
            which the share multiplies.

    Returns:
        float32 (N, groups), in (0, 1], of those tried; of equals, the largest.
    """
    rows = groups.flatten(0, 1)
    if symmetric:
        widest, by = weight_scale(rows, bits=bits), torch.ones(1, 1)

        def error_of(share: Tensor) -> Tensor:
            scale = (widest * share).clamp(min=SCALE_MIN)
            return _fine_enough(_error(rows, in_half(scale), by, bits), scale, widest)

        return _least(widest, error_of)[0].view(groups.shape[:2])
    low, high = rows.amin(1).clamp(max=0.0), rows.amax(1).clamp(min=0.0)
    widest = affine_qparams(low, high, 0, 2**bits - 1)[0]
    share, _ = _least(low, lambda share: _affine_error(rows, low * share, high * share, widest, bits))
    return share.view(groups.shape[:2])


def _least(like: Tensor, error_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The share of each row, of `like`'s shape, that has the least error of those tried, and that error."""
    share, error = torch.ones_like(like), torch.full_like(like, torch.inf)
    for factors in (COARSE, FINE):
        around = share
        for factor in factors.tolist():
            tried = (around * factor).clamp(max=1.0)
            own = error_of(tried)
            better = own < error
            share, error = torch.where(better, tried, share), torch.where(better, own, error)
    return share, error


def scale_by_output(weight: Tensor, hessian: Tensor, *, bits: int, per_row: bool = True) -> Tensor:
    """The symmetric scale with which rounding to nearest has the least error of the output, among SHARES.

    All of equation R1 counts, not the diagonal alone: what clipping takes from a row's largest weights has one sign,
    and adds up over inputs that correlate. By the diagonal, 4-bit weights of an EfficientNet clip too much and lose 5
    dB.

    Args:
        weight: float32 (..., rows, K).
        hessian: float32 (..., K, K).
        bits: 2 to 8.
        per_row: a scale for each row; or one for all.

    Returns:
        float32 (..., rows).
    """
    flat = weight.reshape(-1, weight.shape[-1])
    widest = (
        weight_scale(flat if per_row else flat.reshape(1, -1), bits=bits).expand(len(flat)).reshape(weight.shape[:-1])
    )
    top = 2 ** (bits - 1) - 1
    errors = []
    for share in SHARES.tolist():
        step = (widest * share).clamp(min=SCALE_MIN)[..., None]
        error = output_error(weight, torch.round(weight / step).clamp_(-top, top) * step, hessian)
        errors.append(error if per_row else error.sum().expand_as(error))
    chosen = SHARES[torch.stack(errors).argmin(0)]
    return (widest * chosen).clamp(min=SCALE_MIN).contiguous()


def refitted_scale(q: Tensor, target: Tensor, hessian: Tensor, scale: Tensor) -> Tensor:
    """The scale of each row with the least error of equation R1 for integers that are chosen already.

    (s q - t) H (s q - t)' is a parabola in s, with its least value at q H t' / q H q'. A row whose parabola says
    nothing, or points elsewhere than near its scale, keeps that.

    Args:
        q, target: float32 (..., rows, K).
        hessian: float32 (..., K, K).
        scale: float32 (..., rows).
    """
    weighted = q.double() @ hessian.double()
    best = (weighted * target.double()).sum(-1) / (weighted * q.double()).sum(-1)
    near = torch.isfinite(best) & (best > scale / FARTHEST) & (best < scale * FARTHEST)
    return torch.where(near, best.to(torch.float32), scale)


def _error(rows: Tensor, scale: Tensor, importance: Tensor, bits: int) -> Tensor:
    """The weighted square error of each row, float32 (rows,)."""
    top = 2 ** (bits - 1) - 1
    by_row = scale[:, None]
    q = torch.round(rows * (1.0 / by_row)).clamp_(-top, top)
    return q.mul_(by_row).sub_(rows).square_().mul(importance).sum(1)


def _affine_error(rows: Tensor, low: Tensor, high: Tensor, widest: Tensor, bits: int) -> Tensor:
    """The square error of each row, float32 (rows,), in all integers of a range that includes 0."""
    top = 2**bits - 1
    exact = affine_qparams(low, high, 0, top)[0]
    scale = in_half(exact)
    inverse = 1.0 / scale
    zero_point = torch.round(-low * inverse).clamp_(0, top)[:, None]
    q = torch.round(rows * inverse[:, None]).add_(zero_point).clamp_(0, top)
    return _fine_enough(q.sub_(zero_point).mul_(scale[:, None]).sub_(rows).square_().sum(1), exact, widest)


def _fine_enough(error: Tensor, scale: Tensor, widest: Tensor) -> Tensor:
    """The error, or inf where the scale is no normal float16 any more: one such group takes float32 for all scales."""
    return torch.where((scale < HALF_MIN) & (widest >= HALF_MIN), torch.inf, error)
