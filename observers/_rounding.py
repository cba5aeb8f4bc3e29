"""Quantise-dequantise in float, equal to QParams.dequantize(QParams.quantize(x)) bit for bit, and what lies in range.

All fake quantisers share this one function: the arithmetic that is trained with is the arithmetic that is deployed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from quant.kernels import QScheme
from quant.kernels.ops import extension_problem
from quant.kernels.scheme import SCALE_MIN, affine_qparams, divided
from torch import Tensor

CHUNK = 65536
"""Values rounded at a time: the temporary stays in a core's L2 cache, where the allocator also finds it again. Whole
tensors of temporaries are fresh pages each time, which costs several times the arithmetic."""


NO_CLAMP = (-math.inf, math.inf)


def round_trip(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    scheme: QScheme,
    *,
    with_mask: bool,
    clamp: tuple[float, float] = NO_CLAMP,
) -> tuple[Tensor, Tensor | None]:
    """Equations 2 and 1 of kernels/README.md, one after the other, without leaving float32.

    Args:
        x: float32, any shape.
        scale, zero_point: float32 and int32, () or (channels,) as scheme.axis says.
        with_mask: also say where x is in range: inside the clamp, and where rounding, not clamping, decided.
        clamp: (low, high) that x is clamped to first, such as a ReLU's.

    Returns:
        (float32 of x's shape and strides, bool of x's shape or None). NaN becomes 0 and is out of range, infinities
        clamp.
    """
    if compiled(x):
        out, mask = torch.ops.octet.fake_quantize(
            x, scale, zero_point, scheme.axis, scheme.quant_min, scheme.quant_max, *clamp, with_mask
        )
        return out, mask if with_mask else None
    unclamped = x
    if clamp != NO_CLAMP:
        x = x.clamp(*clamp)
    out, mask = _round_trip(x, scale, zero_point, scheme, with_mask)
    if mask is not None and clamp != NO_CLAMP:
        mask = mask & (unclamped > clamp[0]) & (unclamped < clamp[1])
    return out, mask


def as_dtype(out: Tensor, dtype: torch.dtype) -> Tensor:
    """A function's result in a dtype: itself where it has it.

    torch 2.11 compiles an autograd function that returns what `.to` gave unchanged with the gradient of the operation
    before, and of rounding that is zero.
    """
    return out if out.dtype == dtype else out.to(dtype)


def gradient_inside(grad: Tensor, mask: Tensor) -> Tensor:
    """The gradient where mask is true, else 0; grad's dtype."""
    if compiled(mask) and not (torch.is_grad_enabled() and grad.requires_grad):  # for a second gradient
        passed: Tensor = torch.ops.octet.masked_gradient(grad.to(torch.float32), mask)
        return passed.to(grad.dtype)
    return torch.where(mask, grad, 0.0)


def compiled(x: Tensor) -> bool:
    """Whether the extension rounds `x`. Not under torch.compile, which fuses plain arithmetic with its neighbours."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not extension_problem()


def _round_trip(
    x: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme, with_mask: bool
) -> tuple[Tensor, Tensor | None]:
    scale, zero_point = along_axis(scale, scheme, x.dim()), along_axis(zero_point, scheme, x.dim())
    inverse = 1.0 / scale
    if torch.compiler.is_compiling():  # what can be fused
        q = torch.round(x * inverse) + zero_point
        clamped = q.clamp(scheme.quant_min, scheme.quant_max)
        values = ((clamped - zero_point) * scale).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        return values, clamped == q if with_mask else None
    out = torch.empty_like(x)
    mask = torch.empty_like(x, dtype=torch.bool) if with_mask else None
    for piece, result, inside in _pieces(x, out, mask, scheme):
        q = torch.round(piece * inverse).add_(zero_point)
        torch.clamp(q, scheme.quant_min, scheme.quant_max, out=result)
        if inside is not None:
            torch.eq(result, q, out=inside)
        # Not clamped to [quant_min - zero_point, ...] in one step: that would leave -0.0 where the integers give +0.0.
        result.sub_(zero_point).mul_(scale)
        # NaN stood for itself so far, so that it is out of range; QParams.quantize makes it the zero point.
        result.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    return out, mask


def _pieces(
    x: Tensor, out: Tensor, mask: Tensor | None, scheme: QScheme
) -> Iterable[tuple[Tensor, Tensor, Tensor | None]]:
    """Views of the three tensors that together cover them: one, or CHUNK values each where that is possible."""
    whole = [(x, out, mask)]
    if x.numel() <= CHUNK or scheme.axis is not None or x.device.type != "cpu":
        return whole
    if x.stride() != out.stride():  # empty_like keeps the strides of a tensor without gaps or overlaps, and no other's
        return whole
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    flats = [torch.split(t.permute(order).view(-1), CHUNK) for t in (x, out)]
    masks = [None] * len(flats[0]) if mask is None else torch.split(mask.permute(order).view(-1), CHUNK)
    return zip(*flats, masks, strict=True)


def along_axis(values: Tensor, scheme: QScheme, dim: int) -> Tensor:
    """Values of shape () or (channels,), shaped to broadcast against a tensor of `dim` dimensions."""
    if scheme.axis is None:
        return values
    shape = [1] * dim
    shape[scheme.axis] = -1
    return values.view(shape)


def scale_and_zero_point(low: Tensor, high: Tensor, scheme: QScheme) -> tuple[Tensor, Tensor]:
    """choose_qparams without its checks, so that a training step waits for no value and torch.compile breaks no graph.

    Args:
        low, high: float32 of one shape. Where low > high, the sign of no data, the scale is NaN: nothing computed with
            it can pass for a result.

    Returns:
        (scale float32, zero_point int32), bit for bit those of choose_qparams where low <= high.
    """
    empty = low > high
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    if scheme.symmetric:
        middle = scheme.symmetric_zero_point
        bound = torch.maximum(-low, high)
        scale = divided(bound, min(scheme.quant_max - middle, middle - scheme.quant_min)).clamp(min=SCALE_MIN)
        zero_point = torch.full_like(scale, middle)
    else:
        scale, zero_point = affine_qparams(low, high, scheme.quant_min, scheme.quant_max)
    return torch.where(empty, torch.nan, scale), zero_point.to(torch.int32)
