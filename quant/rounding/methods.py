"""The methods by their names: integers of a weight by equation R1, and what they and rounding to nearest lose."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quant.kernels import QScheme, narrow, weight_scheme
from quant.rounding.adaround import STEPS, adaround
from quant.rounding.descent import descend, output_error
from quant.rounding.gptq import Rounded, gptq, group_qparams
from quant.rounding.grid import Grid

NEAREST = "nearest"
"""Rounding of each weight by itself."""

METHODS = ("gptq", "adaround")
"""Those that look at what a weight does to the output."""


class Choice(NamedTuple):
    """Integers, and the error of the output on the data.

    Attributes:
        q: float32 (..., rows, K), whole numbers.
        error, nearest: with these, and with rounding to nearest; without what no integers change.
    """

    q: Tensor
    error: float
    nearest: float


def choose_integers(
    method: str,
    weight: Tensor,
    scale: Tensor,
    hessian: Tensor,
    target: Tensor | None = None,
    *,
    bits: int,
    steps: int | None = None,
) -> Choice:
    """The integers of a weight by a method, row by row no worse than rounding to nearest.

    Args:
        method: of METHODS, or NEAREST.
        weight: float32 (..., rows, K).
        scale: float32 (..., rows), positive.
        hessian: float32 (..., K, K), damped.
        target: t of equation R1, of the weight's shape; None for the weight itself.
        bits: 2 to 8.
        steps: of "adaround"; None for its default.
    """
    nearest = Grid.of(weight, scale, bits).nearest(weight)
    target = weight if target is None else target
    before = errors_of(target, nearest, scale, hessian)
    if method == NEAREST:
        return Choice(nearest, float(before.sum()), float(before.sum()))
    if method == METHODS[0]:
        q = gptq(target, hessian, weight_scheme(bits), scale=scale, damping=0.0).q.to(torch.float32)
    else:
        q = adaround(target, scale, hessian, bits=bits, steps=steps or STEPS)
    q = descend(q, target, scale, hessian, bits=bits)
    error = errors_of(target, q, scale, hessian)
    q = torch.where((error < before)[..., None], q, nearest)
    return Choice(q, float(torch.minimum(error, before).sum()), float(before.sum()))


def choose_in_groups(
    method: str,
    weight: Tensor,
    hessian: Tensor,
    scheme: QScheme,
    group_size: int,
    *,
    bits: int,
    steps: int | None = None,
) -> Rounded:
    """The integers of a weight with a scale for each group of columns, and scales as a narrow weight stores them.

    GPTQ chooses a group's scale when its turn comes, AdaRound learns by scales that fit the weight itself.

    Args:
        method: of METHODS.
        weight: float32 (rows, K).
        hessian: float32 (K, K), damped.
        scheme: symmetric, or with zero points.
        group_size: a divisor of K.
        bits: of the scheme.
        steps: of "adaround"; None for its default.
    """
    begun: Tensor | None = None
    if method == METHODS[0]:
        begun, scale, zero = gptq(weight, hessian, scheme, group_size=group_size, damping=0.0)
    else:
        own = group_qparams(weight[None], hessian.diagonal()[None], scheme, group_size)
        scale, zero = own[0][0].to(torch.float32), own[1][0].to(torch.int32)
    scale = narrow.stored_scale(scale).to(torch.float32)
    zero_point = None if scheme.symmetric else zero
    added = zero.repeat_interleave(group_size, dim=1)
    if begun is None:
        q = adaround(weight, scale, hessian, bits=bits, steps=steps or STEPS, zero_point=zero_point)
    else:
        q = begun.to(torch.float32) - added
    q = descend(q, weight, scale, hessian, bits=bits, zero_point=zero_point)
    return Rounded((q + added).to(scheme.dtype), scale, zero)


def errors_of(target: Tensor, q: Tensor, scale: Tensor, hessian: Tensor) -> Tensor:
    """What rounding adds to each row's error, float64 (..., rows)."""
    return output_error(target.double(), (q * scale[..., None]).double(), hessian.double())
