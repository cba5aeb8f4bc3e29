"""Rounded weights and biases with a gradient; the scales are those that `static.weights` chooses for convert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quant.kernels import weight_scheme
from quant.observers.fake_quantize import fake_quantize
from quant.ops.step import Step
from quant.runtime.layers.requantizing import quantized_bias


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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
