"""Rounded weights and biases with a gradient; the scales are those that `static.weights` chooses for convert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels import weight_scheme
from quant.observers.fake_quantize import compiled, fake_quantize
from quant.ops.step import Step
from quant.runtime.layers.requantizing import BIAS_LIMIT, quantized_bias
from quant.static.weights import not_finite


def rounded_weight(weight: Tensor, scale: Tensor, step: Step) -> Tensor:
    """dequantize(quantize(weight)) per output channel, in the layer's layout; the gradient goes straight through.

    Args:
        weight: float32, folded.
        scale: float32 (out,), of `row_scale`.
    """
    assert step.qconfig is not None
    scheme = weight_scheme(step.qconfig.weight_bits)
    rows = step.weighted.output_first(weight)
    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    if not step.qconfig.clips_weights:
        # The range covers the weight, so nothing is clamped, and backward needs no mask.
        rounded = straight_through(rows, fake_quantize(rows.detach(), scale, zero_point, scheme))
    else:
        rounded = fake_quantize(rows, scale, zero_point, scheme)
    return step.weighted.as_layer(rounded)


def folded_and_rounded(
    weight: Tensor, gain: Tensor | None, bias: Tensor | None, input_scale: Tensor, step: Step
) -> tuple[Tensor, Tensor] | None:
    """weight * gain rounded by `row_scale` and `rounded_weight`, and the scale, in one call; None where that is not
    possible. A gradient goes straight through, times the gain.

    Args:
        weight: in the layer's layout, not folded.
        gain: float32 (out,), a constant to the gradient; None for none.
        bias, input_scale: as for `row_scale`.

    Raises:
        ValueError: the weight holds NaN or inf; with the layer's name.
    """
    assert step.qconfig is not None
    rows = step.weighted.output_first(weight)
    known = [one for one in (rows, gain, bias) if one is not None]
    if step.qconfig.clips_weights or not step.qconfig.per_channel or not all(map(_is_plain, known)):
        return None
    given_bias = None if bias is None else bias.detach()
    given_scale = None if bias is None else input_scale
    rounded, scale = torch.ops.octet.round_weight(
        rows.detach(), gain, given_bias, given_scale, BIAS_LIMIT, 2 ** (step.qconfig.weight_bits - 1) - 1
    )
    if not bool(torch.isfinite(scale).all()):
        sound = bias is None or bool(torch.isfinite(bias).all())
        raise not_finite(step, "weight" if sound or not bool(torch.isfinite(rows).all()) else "bias")
    if rows.requires_grad:
        rounded = _Folded.apply(rows, gain, rounded)  # type: ignore[no-untyped-call]
    return step.weighted.as_layer(rounded), scale


def _is_plain(x: Tensor) -> bool:
    return compiled(x) and x.dtype == torch.float32 and (type(x) is Tensor or type(x) is nn.Parameter)


class _Folded(torch.autograd.Function):
    """Rows times a gain, which were rounded."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gain: Tensor | None, rounded: Tensor) -> Tensor:
        ctx.save_for_backward(gain)
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gain,) = ctx.saved_tensors
        return grad if gain is None else grad * gain.view(-1, *[1] * (grad.dim() - 1)), None, None


def rounded_bias(bias: Tensor | None, scale: Tensor) -> Tensor | None:
    """A float32 bias, rounded to int32 at `scale` (s_x * s_w, (out,)); the gradient goes straight through."""
    if bias is None:
        return None
    return straight_through(bias, quantized_bias(bias.detach(), scale) * scale)


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """`value` to the bit, with the gradient of x; x + (value - x).detach() would round twice more."""
    out: Tensor = _StraightThrough.apply(x, value)  # type: ignore[no-untyped-call]
    return out


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
