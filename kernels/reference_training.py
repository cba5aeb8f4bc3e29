"""What the operators of training mean: quantise-dequantise, its straight-through gradient, and what ranges follow."""

from __future__ import annotations

import torch
from quant.kernels.scheme import SCALE_MIN, affine_qparams, divided, weight_scale
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
    check_limits(quant_min, quant_max)
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


def check_limits(quant_min: int, quant_max: int) -> None:
    """Raise ValueError for limits of integers that float32 does not hold, or in another order."""
    if not -(2**24) <= quant_min < quant_max <= 2**24:
        raise ValueError(
            f"quant_min is {quant_min} and quant_max {quant_max}, expected two numbers from -2**24 to 2**24, the "
            "smaller one first"
        )


def masked_gradient(grad: Tensor, mask: Tensor) -> Tensor:
    """grad where mask is true, else 0 (Bengio et al. 2013, arXiv 1308.3432): the gradient that clamping lets through.

    0, not grad * mask: an infinite gradient times zero would be NaN.
    """
    return torch.where(mask, grad, 0.0)


def follow_range(
    x: Tensor,
    momentum: float,
    low: float,
    high: float,
    quant_min: int,
    quant_max: int,
    middle: int | None,
    average_low: Tensor,
    average_high: Tensor,
    batches: Tensor,
    nan_count: Tensor,
    inf_count: Tensor,
    scale: Tensor,
    zero_point: Tensor,
) -> None:
    """Take clamp(x, low, high) into a moving average of each batch's extremes, and choose its scale and zero point.

    Args:
        x: float32, any shape.
        momentum: weight of the newest batch, in (0, 1].
        middle: the zero point of a symmetric range, None for an affine one.
        average_low, average_high: float32, one value each, changed in place; inf and -inf before the first batch, which
            sets them.
        batches, nan_count, inf_count: int64, one value each, changed in place; how many batches had finite values, and
            how many clamped values were left out.
        scale, zero_point: float32 and int32, one value each, changed in place; NaN where the average is empty.
    """
    check_limits(quant_min, quant_max)
    if middle is not None and not quant_min < middle < quant_max:
        raise ValueError(f"middle is {middle}, expected a number between {quant_min} and {quant_max}")
    clamped = x.clamp(low, high)
    finite = torch.isfinite(clamped)
    seen = clamped[finite]
    if seen.numel():
        for average, newest in zip((average_low, average_high), torch.aminmax(seen), strict=True):
            mixed = average * (1.0 - momentum) + newest * momentum
            average.copy_(torch.where(torch.isinf(average), newest, mixed))
        batches += 1
    nan_count += torch.isnan(clamped).sum()
    inf_count += torch.isinf(clamped).sum()
    chosen, point = _scale_of(average_low, average_high, quant_min, quant_max, middle)
    scale.copy_(torch.where(average_low > average_high, torch.nan, chosen).view(scale.shape))
    zero_point.copy_(point.view(zero_point.shape))


def _scale_of(low: Tensor, high: Tensor, quant_min: int, quant_max: int, middle: int | None) -> tuple[Tensor, Tensor]:
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    if middle is None:
        return affine_qparams(low, high, quant_min, quant_max)
    scale = divided(torch.maximum(-low, high), min(quant_max - middle, middle - quant_min)).clamp(min=SCALE_MIN)
    return scale, torch.full_like(scale, middle)


def round_weight(
    weight: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    largest_bias: float,
    quant_max: int,
) -> tuple[Tensor, Tensor]:
    """weight * gain, rounded to [-quant_max, quant_max] with a scale per row, and dequantised.

    Args:
        weight: float32 (rows, ...).
        gain: float32 (rows,), of what is folded in; None for none.
        bias, input_scale: float32 (rows,) and (), which come together: the scale is made so coarse that each bias is at
            most `largest_bias` steps of input_scale * scale.

    Returns:
        float32 of the weight's shape, contiguous.
        The scale, float32 (rows,), which is not finite where the row is not. A row of zeros has 1.
    """
    if not 0 < quant_max < 2**24 or quant_max & (quant_max + 1):
        raise ValueError(f"quant_max is {quant_max}, expected 2**bits - 1 of 1 to 24 bits")
    rows = weight if gain is None else weight * gain.view(-1, *[1] * (weight.dim() - 1))
    scale = weight_scale(rows, bits=quant_max.bit_length() + 1)
    if bias is not None and input_scale is not None:
        scale = torch.maximum(scale, bias.abs() / largest_bias / input_scale)
    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    infinity = float("inf")
    rounded = fake_quantize(rows, scale, zero_point, 0, -quant_max, quant_max, -infinity, infinity, False)[0]
    return rounded.contiguous(), scale


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of float32 (batch, channels, ...), float32 (channels,).

    The sums are of float64, so that their order shows in a result about once in a million; the squares are of float32,
    (x - mean)**2 with the rounded mean, as torch's batch norm computes them.
    """
    rows = x.transpose(0, 1).flatten(1)
    mean = (rows.sum(1, dtype=torch.float64) / rows.shape[1]).to(torch.float32)
    squares = (rows - mean[:, None]).square().sum(1, dtype=torch.float64).to(torch.float32)
    return mean, (squares.double() / rows.shape[1]).to(torch.float32)
