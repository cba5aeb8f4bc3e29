"""GPTQ: column by column, with what each rounding loses made up for by the columns that are still to come.

Frantar et al. 2022 (arXiv:2210.17323), Algorithm 1: for the least sum_rows (v - w) H (v - w)', H = E[x x'], a column
that is rounded leaves an error which the other columns of its row can partly take over, by

    w_j -= (w_k - q(w_k)) / U_kk * U_kj    for j > k                    (2)

with U the upper Cholesky factor of the inverse of H, damped. Columns are done in blocks, so that most of the
updates are products of matrices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quant.kernels import QScheme, choose_qparams
from quant.rounding.scales import least_error_scale

DAMPING = 0.01
"""The share of the mean diagonal of H that is added to it, as in section 3.3 there."""

MOST_DAMPING = 1.0
"""The share up to which it grows for a singular H; second moments need far less."""

BLOCK = 128
"""Columns whose updates of all later ones are made in one product."""


class Rounded(NamedTuple):
    """Integers with their scales: weight ~ scale * (q - zero_point).

    Attributes:
        q: int8 or uint8 as the scheme's dtype, of the weight's shape (..., rows, K).
        scale: float32 (..., rows), or (..., rows, groups) where there are groups.
        zero_point: int32, of the same shape.
    """

    q: Tensor
    scale: Tensor
    zero_point: Tensor


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: QScheme,
    *,
    scale: Tensor | None = None,
    group_size: int | None = None,
    damping: float = DAMPING,
    act_order: bool = False,
) -> Rounded:
    """The integers of a linear layer's weight by Algorithm 1.

    Args:
        weight: float (rows, K); or (batch, rows, K) for as many layers at once, as the groups of a convolution are.
        hessian: float (K, K) or (batch, K, K), E[x x'] of the layer's input, up to a factor. Inputs that are always 0
            are rounded to nearest.
        scheme: of the integers, symmetric or not; its axis is not used.
        scale: float32 (rows,) or (batch, rows) of a symmetric scheme; None chooses it by the diagonal of the Hessian.
        group_size: columns with a scale of their own, chosen when their turn comes, as the weights then are. None for
            a scale per row.
        damping: share of the mean diagonal that is added to H; made larger where H is singular all the same.
        act_order: columns with the largest inputs first. Groups then have their scales from the weights at the start.

    Raises:
        ValueError: shapes that do not fit, a group size that does not divide K, NaN or inf.
    """
    _check(weight, hessian, scheme, scale, group_size)
    if weight.dim() == 2:
        rounded = gptq(
            weight[None], hessian[None], scheme, scale=None if scale is None else scale[None], group_size=group_size,
            damping=damping, act_order=act_order,
        )  # fmt: skip
        return Rounded(*(one[0] for one in rounded))
    own, batch, columns = weight.detach().to(torch.float64), weight.shape[0], weight.shape[2]
    moments = hessian.detach().to(torch.float64).clone()
    diagonal = moments.diagonal(dim1=1, dim2=2)
    importance = diagonal.clone().to(torch.float32)
    diagonal[diagonal <= 0] = 1.0
    order = importance.argsort(dim=1, descending=True, stable=True) if act_order else None
    size = columns if group_size is None else group_size
    scales, zeros = group_qparams(own, importance, scheme, size)
    if scale is not None:
        scales, zeros = (
            scale.to(torch.float64)[..., None],
            torch.full_like(scales[..., :1], scheme.symmetric_zero_point),
        )
    group_of = torch.arange(columns).div(size, rounding_mode="floor").expand(batch, columns)
    if order is not None:
        own = own.gather(2, order[:, None].expand_as(own))
        moments = torch.stack([one[by][:, by] for one, by in zip(moments, order, strict=True)])
        group_of = group_of.gather(1, order)
    q = _rounded(own.clone(), _factor(moments, damping), scheme, scales, zeros, group_of,
                 importance if group_size is not None and order is None else None, size)  # fmt: skip
    if order is not None:
        q = torch.empty_like(q).scatter_(2, order[:, None].expand_as(q), q)
    kept = (scales, zeros) if group_size is not None else (scales[..., 0], zeros[..., 0])
    return Rounded(q.to(scheme.dtype), kept[0].to(torch.float32), kept[1].to(torch.int32))


def _rounded(
    weight: Tensor,
    factor: Tensor,
    scheme: QScheme,
    scales: Tensor,
    zeros: Tensor,
    group_of: Tensor,
    importance: Tensor | None,
    size: int,
) -> Tensor:
    """Lines 5 to 13 of Algorithm 1; `weight` (batch, rows, K) is overwritten, and groups' scales where chosen late."""
    q = torch.empty_like(weight)
    columns = weight.shape[2]
    rows = torch.arange(weight.shape[0])
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = torch.empty_like(weight[..., start:end])
        for k in range(start, end):
            if importance is not None and k % size == 0:
                ahead = weight[..., k : k + size].clone()
                # Columns behind this block have not heard of its errors yet.
                ahead[..., end - k :] -= errors[..., : k - start] @ factor[:, start:k, end : k + size]
                own = group_qparams(ahead, importance[:, k : k + size], scheme, size)
                scales[..., k // size], zeros[..., k // size] = own[0][..., 0], own[1][..., 0]
            group = group_of[:, k]
            scale, zero = scales[rows, :, group], zeros[rows, :, group]
            now = weight[..., k]
            q[..., k] = (torch.round(now / scale) + zero).clamp(scheme.quant_min, scheme.quant_max)
            error = (now - (q[..., k] - zero) * scale) / factor[:, k, k, None]
            weight[..., k:end] -= error[..., None] * factor[:, k, None, k:end]
            errors[..., k - start] = error
        weight[..., end:] -= errors @ factor[:, start:end, end:]
    return q


def _factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of a damped Hessian, (batch, K, K)."""
    mean = hessian.diagonal(dim1=1, dim2=2).mean(1)
    added = damping
    while added <= max(damping, MOST_DAMPING):
        damped = hessian + torch.diag_embed((added * mean)[:, None].expand(hessian.shape[:2]))
        lower, fails = torch.linalg.cholesky_ex(damped)
        if not bool(fails.any()):
            upper, fails = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not bool(fails.any()):
                factor: Tensor = upper
                return factor
        added = max(added, 1e-6) * 10.0
    raise ValueError(
        "gptq: the Hessian has no Cholesky factor even with all of its mean diagonal added; it is no matrix of second "
        "moments"
    )


def group_qparams(weight: Tensor, importance: Tensor, scheme: QScheme, size: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points, float64 (batch, rows, groups), of `size` neighbouring columns each.

    Args:
        weight: float (batch, rows, K).
        importance: float32 (batch, K), the diagonal of the Hessian, by which a symmetric scheme's scales are chosen.
    """
    batch, rows, columns = weight.shape
    groups = columns // size
    parts = weight.reshape(batch * rows * groups, size).to(torch.float32)
    if scheme.symmetric:
        by = importance.reshape(batch, 1, groups, size).expand(batch, rows, groups, size).reshape(-1, size)
        bits = int(scheme.quant_max).bit_length() + 1
        scale = least_error_scale(parts, by, bits=bits)
        zero = torch.full_like(scale, scheme.symmetric_zero_point)
    else:
        qparams = choose_qparams(parts.amin(1), parts.amax(1), replace(scheme, axis=0))
        scale, zero = qparams.scale, qparams.zero_point
    shape = (batch, rows, groups)
    return scale.reshape(shape).to(torch.float64), zero.reshape(shape).to(torch.float64)


def _check(weight: Tensor, hessian: Tensor, scheme: QScheme, scale: Tensor | None, group_size: int | None) -> None:
    if weight.dim() not in (2, 3) or hessian.shape != (*weight.shape[:-2], weight.shape[-1], weight.shape[-1]):
        raise ValueError(
            f"gptq: weight has shape {tuple(weight.shape)} and hessian {tuple(hessian.shape)}, expected (rows, K) and "
            "(K, K), or the same with a batch before"
        )
    for name, one in (("weight", weight), ("hessian", hessian)):
        if not bool(torch.isfinite(one).all()):
            raise ValueError(f"gptq: {name} holds NaN or inf, expected finite values")
    if scale is not None and (scale.shape != weight.shape[:-1] or group_size is not None or not scheme.symmetric):
        raise ValueError(
            f"gptq: scale has shape {tuple(scale.shape)}, expected {tuple(weight.shape[:-1])}, for a symmetric scheme "
            "without groups; leave it out to have scales chosen"
        )
    if group_size is not None and (group_size < 1 or weight.shape[-1] % group_size):
        raise ValueError(f"gptq: group_size is {group_size}, expected a divisor of the {weight.shape[-1]} inputs")
