"""The methods by their names: integers of a weight by equation R1, and what they and rounding to nearest lose."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quant.kernels import weight_scheme
from quant.rounding.adaround import STEPS, adaround
from quant.rounding.descent import descend, output_error
from quant.rounding.gptq import gptq

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


def nearest_integers(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Rounding to nearest: float32 of the weight's shape (..., rows, K); scale (..., rows)."""
    top = 2 ** (bits - 1) - 1
    return torch.round(weight / scale[..., None]).clamp(-top, top)


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
    nearest = nearest_integers(weight, scale, bits)
    target = weight if target is None else target
    before = _errors(target, nearest, scale, hessian)
    if method == NEAREST:
        return Choice(nearest, float(before.sum()), float(before.sum()))
    if method == METHODS[0]:
        q = gptq(target, hessian, weight_scheme(bits), scale=scale, damping=0.0).q.to(torch.float32)
    else:
        q = adaround(target, scale, hessian, bits=bits, steps=steps or STEPS)
    q = descend(q, target, scale, hessian, bits=bits)
    error = _errors(target, q, scale, hessian)
    q = torch.where((error < before)[..., None], q, nearest)
    return Choice(q, float(torch.minimum(error, before).sum()), float(before.sum()))


def _errors(target: Tensor, q: Tensor, scale: Tensor, hessian: Tensor) -> Tensor:
    """What rounding adds to each row's error, float64 (..., rows)."""
    return output_error(target.double(), (q * scale[..., None]).double(), hessian.double())
