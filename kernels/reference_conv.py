"""The oracle for convolutions of one to three dimensions, transposed ones too: exact sums, then requantised.

Tensors have torch's shapes (N, C, spatial...) in any memory format; dims is q_weight.dim() - 2. Float64 carries the
integers: every sum stays far below 2**53, so convolution in float64 is exact and in no particular order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from quant.kernels.plan_sizes import check_memory
from quant.kernels.reference import check_bytes, check_products, requantize
from torch import Tensor

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def conv_u8s8_s32(
    q_x: Tensor,
    zero_point: int,
    q_weight: Tensor,
    q_bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Exact sums of a convolution (equations 5 and 6), zero points removed, bias added.

    Args:
        q_x: uint8, (N, C, spatial...).
        zero_point: of q_x, which is also what the padding holds: the real zero.
        q_weight: int8, (out, C / groups, kernel...).
        q_bias: int32 (out,) at scale s_x * s_w, or None.
        stride, padding, dilation: one number per spatial dimension; padding on both sides.

    Returns:
        int32, (N, out, spatial...), in the memory format of q_x.

    Raises:
        TypeError, ValueError: as `check_conv`.
    """
    check_conv(q_x, q_weight, stride, padding, dilation, groups)
    check_bytes(zero_point=zero_point)
    x, weight = _centred(q_x, zero_point), q_weight.to(torch.float64)
    if 0 in (x.numel(), weight.numel()):  # torch refuses some, and takes no channels for no outputs
        sums = x.new_zeros(x.shape[0], weight.shape[0], *out_sizes(q_x, q_weight, stride, padding, dilation))
    else:
        sums = _CONV[q_weight.dim() - 2](x, weight, None, stride, padding, dilation, groups)
    return _add_bias(sums, q_bias)


def conv_transpose_u8s8_s32(
    q_x: Tensor,
    zero_point: int,
    q_weight: Tensor,
    q_bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_padding: Sequence[int],
) -> Tensor:
    """Exact sums of a transposed convolution; as `conv_u8s8_s32`, with q_weight (C, out / groups, kernel...)."""
    check_bytes(zero_point=zero_point)
    conv = _TRANSPOSED[q_weight.dim() - 2]
    x, weight = _centred(q_x, zero_point), q_weight.to(torch.float64)
    return _add_bias(conv(x, weight, None, stride, padding, output_padding, groups, dilation), q_bias)


def conv_u8s8_u8(
    q_x: Tensor,
    zero_point: int,
    q_weight: Tensor,
    q_bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    multiplier: Tensor,
    output_zero_point: int,
    quant_min: int,
    quant_max: int,
) -> Tensor:
    """`conv_u8s8_s32` requantised with s_x * s_w / s_y (float32 (out,), equation 7): uint8."""
    sums = conv_u8s8_s32(q_x, zero_point, q_weight, q_bias, stride, padding, dilation, groups)
    return requantize_channels(sums, multiplier, output_zero_point, quant_min, quant_max)


def conv_u8s8_f32(
    q_x: Tensor,
    zero_point: int,
    q_weight: Tensor,
    q_bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    multiplier: Tensor,
) -> Tensor:
    """`conv_u8s8_s32` times s_x * s_w (float32 (out,)): float32."""
    sums = conv_u8s8_s32(q_x, zero_point, q_weight, q_bias, stride, padding, dilation, groups)
    return scale_channels(sums, multiplier)


def conv_transpose_u8s8_u8(
    q_x: Tensor,
    zero_point: int,
    q_weight: Tensor,
    q_bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_padding: Sequence[int],
    multiplier: Tensor,
    output_zero_point: int,
    quant_min: int,
    quant_max: int,
) -> Tensor:
    """`conv_transpose_u8s8_s32` requantised, as `conv_u8s8_u8`."""
    sums = conv_transpose_u8s8_s32(q_x, zero_point, q_weight, q_bias, stride, padding, dilation, groups, output_padding)
    return requantize_channels(sums, multiplier, output_zero_point, quant_min, quant_max)


def conv_transpose_u8s8_f32(
    q_x: Tensor,
    zero_point: int,
    q_weight: Tensor,
    q_bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_padding: Sequence[int],
    multiplier: Tensor,
) -> Tensor:
    """`conv_transpose_u8s8_s32` times s_x * s_w: float32."""
    sums = conv_transpose_u8s8_s32(q_x, zero_point, q_weight, q_bias, stride, padding, dilation, groups, output_padding)
    return scale_channels(sums, multiplier)


def check_conv(
    q_x: Tensor,
    q_weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> None:
    """Raise TypeError or ValueError for what is no convolution, as csrc/core/conv/conv_shape.cpp does."""
    if q_x.dtype != torch.uint8 or q_weight.dtype != torch.int8:
        raise TypeError(f"q_x is {q_x.dtype} and q_weight {q_weight.dtype}, expected Byte and Char")
    input, weight, dims = list(q_x.shape), list(q_weight.shape), q_x.dim() - 2
    if not 1 <= dims <= 3 or len(weight) != len(input):
        raise ValueError(
            f"q_x has shape {input} and q_weight {weight}, expected (batch, channels, *spatial) and (out_channels, "
            "channels / groups, *kernel) of 1 to 3 spatial dimensions"
        )
    if groups < 1 or (groups > 1 and 0 in weight[:2]) or input[1] != weight[1] * groups or weight[0] % groups:
        raise ValueError(
            f"q_x has {input[1]} channels, q_weight {weight} expects {weight[1] * groups} in {groups} groups"
        )
    for name, values in (("stride", stride), ("padding", padding), ("dilation", dilation)):
        if len(values) != dims:
            raise ValueError(f"{name} has {len(values)} values, expected {dims}")
    if min(*stride, *dilation) < 1 or min(padding) < 0:
        raise ValueError("stride and dilation must be positive and padding not negative")
    if 0 in weight[2:]:
        raise ValueError(f"the kernel {weight} is empty")
    check_products(math.prod(weight[1:]))
    padded = [size + 2 * pad for size, pad in zip(input[2:], padding, strict=True)]
    if any(size - apart * (taps - 1) < 1 for size, apart, taps in zip(padded, dilation, weight[2:], strict=True)):
        raise ValueError(f"the kernel {weight} does not fit the padded input {input}")
    check_memory([*input[:2], *padded], f"the padded input {input}")


def out_sizes(
    q_x: Tensor, q_weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """The spatial sizes of a convolution's result."""
    settings = zip(q_x.shape[2:], q_weight.shape[2:], stride, padding, dilation, strict=True)
    return [(size + 2 * pad - apart * (taps - 1) - 1) // step + 1 for size, taps, step, pad, apart in settings]


def requantize_channels(
    sums: Tensor, multiplier: Tensor, output_zero_point: int, quant_min: int, quant_max: int
) -> Tensor:
    """`requantize` of (N, channels, spatial...) with a multiplier per channel."""
    return requantize(sums, _along_channels(multiplier, sums.dim()), output_zero_point, quant_min, quant_max)


def scale_channels(sums: Tensor, multiplier: Tensor) -> Tensor:
    """int32 (N, channels, spatial...) times a multiplier per channel: float32."""
    return sums.to(torch.float32) * _along_channels(multiplier, sums.dim())


def _along_channels(values: Tensor, dim: int) -> Tensor:
    return values.reshape(-1, *[1] * (dim - 2))


def _centred(q: Tensor, zero_point: int) -> Tensor:
    return q.to(torch.float64) - zero_point


def _add_bias(sums: Tensor, q_bias: Tensor | None) -> Tensor:
    exact = sums.to(torch.int32)
    return exact if q_bias is None else exact + _along_channels(q_bias, sums.dim())


MOST_REACH = 1024
"""Largest kernel * dilation, stride and padding of `depthwise_f32`."""


def depthwise_f32(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """A depthwise convolution of reals: what calibration runs of a float model.

    Here in double, rounded once. The compiled kernel begins each sum with the bias and takes the taps row by row, each
    product fused with the sum where the CPU can. So do the kernels of oneDNN, which torch has; whether torch's bits
    come is for the caller to try.

    Args:
        x: float32, (N, C, height, width).
        weight: float32, (C, 1, kernel height, kernel width).
        bias: float32, (C,), or None.
        stride, padding, dilation: two numbers each; the padding is zeros, on both sides.

    Returns:
        float32, (N, C, output height, output width), contiguous.

    Raises:
        TypeError: a dtype is another.
        ValueError: a shape does not fit, or a number is out of range (`MOST_REACH`).
    """
    if any(one is not None and one.dtype != torch.float32 for one in (x, weight, bias)):
        raise TypeError(
            f"depthwise_f32: x is {x.dtype} and weight {weight.dtype}, expected torch.float32, and bias too"
        )
    if x.dim() != 4 or weight.dim() != 4 or tuple(weight.shape[:2]) != (x.shape[1], 1):
        shapes = f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}"
        raise ValueError(f"depthwise_f32: {shapes}, expected (N, C, height, width) and (C, 1, height, width)")
    if bias is not None and tuple(bias.shape) != (x.shape[1],):
        raise ValueError(f"depthwise_f32: bias has shape {tuple(bias.shape)}, expected ({x.shape[1]},)")
    if not len(stride) == len(padding) == len(dilation) == 2:
        counts = f"{len(stride)}, {len(padding)} and {len(dilation)}"
        raise ValueError(f"depthwise_f32: stride, padding and dilation have {counts} numbers, expected 2 each")
    for size, kernel, step, pad, apart in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True):
        if min(kernel, step, apart) < 1 or pad < 0 or max(step, pad, kernel * apart) > MOST_REACH:
            raise ValueError(f"depthwise_f32: kernel, stride, padding or dilation is out of range (1 to {MOST_REACH})")
        if size < 1 or size + 2 * pad < (kernel - 1) * apart + 1:
            raise ValueError(f"depthwise_f32: {size} values with padding {pad} are fewer than the kernel's")
    if not x.numel():
        return x.new_zeros(*x.shape[:2], *out_sizes(x, weight, stride, padding, dilation))
    padded = F.pad(x.double(), (padding[1], padding[1], padding[0], padding[0]))
    first = None if bias is None else bias.double()
    sums = F.conv2d(padded, weight.double(), first, tuple(stride), 0, tuple(dilation), x.shape[1])
    return sums.to(torch.float32).contiguous()
