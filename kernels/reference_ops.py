"""The oracle for what stands between layers: look-ups, sums, products, pooling, resizing, padding.

All take and give uint8 with explicit scales, as numbers: real = scale * (q - zero_point). A sum or product that is
requantised uses float32 multipliers and rounds half to even, as the layers do (equation 7). `OPS` is the table by
whose names a converted model calls every integer operator; a backend replaces entries of it, one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from quant.kernels import reference, reference_conv
from torch import Tensor

OpTable: TypeAlias = "Mapping[str, Callable[..., Tensor]]"
"""An operator's name -> a function of plain tensors and numbers, with the arguments of its reference."""

K = TypeVar("K", bound="Callable[..., Tensor]")


def lookup(q: Tensor, table: Tensor, axis: int = 1) -> Tensor:
    """Any function of one value: table[q].

    Args:
        q: uint8, any shape.
        table: uint8, (256,), or (channels, 256) with a row per index of `axis`.

    Returns:
        uint8, shape and memory format of q.
    """
    if table.dim() == 1:
        return _like(q, table[q.to(torch.int64)])
    shape = [1] * q.dim()
    shape[axis] = -1
    rows = torch.arange(table.shape[0]).view(shape)
    return _like(q, table[rows, q.to(torch.int64)])


def add(
    q_a: Tensor,
    a_zero_point: int,
    a_multiplier: float,
    q_b: Tensor,
    b_zero_point: int,
    b_multiplier: float,
    output_zero_point: int,
    quant_min: int,
    quant_max: int,
) -> Tensor:
    """a + b, broadcast: round((q_a - z_a) * m_a + (q_b - z_b) * m_b) + z_y, clamped.

    Args:
        a_multiplier, b_multiplier: s_a / s_y and s_b / s_y, rounded to float32; each product and their sum is too. A
            negative b_multiplier subtracts.
        quant_min, quant_max: of the output; a fused ReLU has quant_min = output_zero_point.
    """
    a = _centred(q_a, a_zero_point) * _f32(a_multiplier)
    b = _centred(q_b, b_zero_point) * _f32(b_multiplier)
    return _clamp(torch.round(a + b), output_zero_point, quant_min, quant_max)


def rescale(q: Tensor, zero_point: int, multiplier: float, output_zero_point: int) -> Tensor:
    """The same reals by another range, s_y and z_y: round((q - z_x) * m) + z_y, clamped to uint8.

    Args:
        multiplier: s_x / s_y, rounded to float32.
    """
    return _rescaled(_centred(q, zero_point), multiplier, output_zero_point)


def mul(
    q_a: Tensor,
    a_zero_point: int,
    q_b: Tensor,
    b_zero_point: int,
    multiplier: float,
    output_zero_point: int,
    quant_min: int,
    quant_max: int,
) -> Tensor:
    """a * b, broadcast: the exact integer product, requantised with s_a * s_b / s_y."""
    # At most 255 * 255, which float32 holds exactly.
    product = _centred(q_a, a_zero_point) * _centred(q_b, b_zero_point)
    return _clamp(torch.round(product * _f32(multiplier)), output_zero_point, quant_min, quant_max)


def matmul(
    q_a: Tensor,
    a_zero_point: int,
    q_b: Tensor,
    b_zero_point: int,
    multiplier: float,
    output_zero_point: int,
    quant_min: int,
    quant_max: int,
) -> Tensor:
    """a @ b for (..., M, K) and (..., K, N): exact sums, requantised with s_a * s_b / s_y."""
    sums = matmul_sums(q_a, a_zero_point, q_b, b_zero_point)
    return reference.requantize(sums, _f32(multiplier), output_zero_point, quant_min, quant_max)


def matmul_f32(q_a: Tensor, a_zero_point: int, q_b: Tensor, b_zero_point: int, multiplier: float) -> Tensor:
    """a @ b, times s_a * s_b: float32."""
    return matmul_sums(q_a, a_zero_point, q_b, b_zero_point).to(torch.float32) * _f32(multiplier)


def matmul_sums(q_a: Tensor, a_zero_point: int, q_b: Tensor, b_zero_point: int) -> Tensor:
    """Exact sums of a @ b, zero points removed: float64 (..., M, N), as int32 may not hold those of K > 33025."""
    a, b = q_a.to(torch.float64) - a_zero_point, q_b.to(torch.float64) - b_zero_point
    return torch.matmul(a, b)


def max_pool(q: Tensor, kernel: Sequence[int], **options: Any) -> Tensor:
    """The largest of each window, options as torch's; the scale stays."""
    pool: Callable[..., Tensor] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(kernel)]
    # float32 holds every uint8 exactly, and has the kernel.
    return pool(_pooled(q, kernel).to(torch.float32), kernel, **options).to(torch.uint8)


def avg_pool(
    q: Tensor, zero_point: int, kernel: Sequence[int], multiplier: float, output_zero_point: int, **options: Any
) -> Tensor:
    """The mean of each window, times s_x / s_y, rounded half to even; options as torch's. Padding counts as zero."""
    pool: Callable[..., Tensor] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[len(kernel)]
    return _rescaled(pool(_exact(_pooled(q, kernel), zero_point), kernel, **options), multiplier, output_zero_point)


def _pooled(q: Tensor, kernel: Sequence[int | None]) -> Tensor:
    """The input of a pool: torch takes a volume without a batch for an image, and refuses it channels last.

    What is contiguous may have the strides of channels last too, in dimensions of size 1: a copy has not.
    """
    return q.clone(memory_format=torch.contiguous_format) if q.dim() == len(kernel) + 1 else q


def adaptive_avg_pool(
    q: Tensor, zero_point: int, size: Sequence[int | None], multiplier: float, output_zero_point: int
) -> Tensor:
    """The mean of windows that tile the input into `size` outputs, times s_x / s_y, rounded half to even."""
    if 0 in q.shape[-len(size) :]:  # NaN, which no integer is
        raise ValueError("its input is empty")
    pool: Callable[..., Tensor] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[
        len(size)
    ]
    return _rescaled(pool(_exact(_pooled(q, size), zero_point), _kept(q, size)), multiplier, output_zero_point)


def adaptive_max_pool(q: Tensor, size: Sequence[int | None]) -> Tensor:
    """The largest of windows that tile the input into `size` outputs; the scale stays."""
    pool: Callable[..., Any] = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}[len(size)]
    pooled: Tensor = pool(_pooled(q, size).to(torch.float32), _kept(q, size))
    return pooled.to(torch.uint8)


def _kept(q: Tensor, size: Sequence[int | None]) -> list[int]:
    """The sizes of an adaptive window, of which None keeps the input's: torch's pools of one dimension take no None."""
    return [old if new is None else new for old, new in zip(q.shape[q.dim() - len(size) :], size, strict=True)]


def mean(
    q: Tensor, zero_point: int, dim: Sequence[int], keepdim: bool, multiplier: float, output_zero_point: int
) -> Tensor:
    """The mean over dimensions, times s_x / s_y, rounded half to even."""
    if any(q.shape[one] == 0 for one in dim):
        raise ValueError("its mean is over 0 values")
    return _rescaled(_exact(q, zero_point).mean(list(dim), keepdim=keepdim), multiplier, output_zero_point)


def interpolate(q: Tensor, zero_point: int, multiplier: float, output_zero_point: int, **options: Any) -> Tensor:
    """torch's interpolate of the real values, times s_x / s_y, rounded half to even.

    In torch the order in which a linear mode rounds depends on the memory format. Here it is one dimension after the
    other, the first first (`_blended`).
    """
    centred = _centred(q, zero_point)
    if options.get("mode") in LINEAR and not options.get("antialias"):
        return _rescaled(_resized_linearly(centred, **options), multiplier, output_zero_point)
    return _rescaled(F.interpolate(centred, **options), multiplier, output_zero_point)


LINEAR = ("linear", "bilinear", "trilinear")


def _resized_linearly(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    **options: Any,
) -> Tensor:
    """F.interpolate in a linear mode, of a tensor whose channels are then innermost."""
    x = x.movedim(1, -1)
    dims = x.dim() - 2
    sizes = size if isinstance(size, Sequence) else [size] * dims
    factors = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * dims
    for dim, (wanted, factor) in enumerate(zip(sizes, factors, strict=True), 1):
        outputs = wanted if factor is None else math.floor(x.shape[dim] * factor)
        assert outputs is not None, "neither a size nor a factor"
        step = None if factor is None or recompute_scale_factor else 1 / factor
        x = _blended(x, dim, outputs, step, bool(align_corners))
    return x.movedim(-1, 1)


def _blended(x: Tensor, dim: int, outputs: int, step: float | None, align_corners: bool) -> Tensor:
    """One dimension resized linearly: x0 * (1 - part) + x1 * part, with places in float32 as torch computes them.

    Args:
        step: the input's values per output; None where the sizes give it.
    """
    size = x.shape[dim]
    place = torch.arange(outputs, dtype=torch.float32)
    if align_corners:
        place = place * (_f32(size - 1) / _f32(max(outputs - 1, 1)))
    elif size != outputs:
        place = ((place + 0.5) * (_f32(size) / _f32(outputs) if step is None else _f32(step)) - 0.5).clamp(min=0)
    first = place.floor().clamp(max=size - 1)
    shape = [-1, *[1] * (x.dim() - dim - 1)]
    part = (place - first).clamp(0, 1).view(shape)
    one = first.to(torch.int64)
    two = (one + 1).clamp(max=size - 1)
    return x.index_select(dim, one) * (1 - part) + x.index_select(dim, two) * part


def pad(q: Tensor, widths: Sequence[int], mode: str, fill: int) -> Tensor:
    """torch's pad; mode "constant" fills with the integer `fill`."""
    if mode == "constant":
        return F.pad(q, list(widths), mode, fill)
    return F.pad(q.to(torch.float32), list(widths), mode).to(q.dtype)


def _centred(q: Tensor, zero_point: int) -> Tensor:
    return (q.to(torch.int32) - zero_point).to(torch.float32)


def _f32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _clamp(rounded: Tensor, zero_point: int, quant_min: int, quant_max: int) -> Tensor:
    return (rounded + zero_point).clamp(quant_min, quant_max).to(torch.uint8)


def _exact(q: Tensor, zero_point: int) -> Tensor:
    return q.to(torch.float64) - zero_point


def _rescaled(centred: Tensor, multiplier: float, zero_point: int) -> Tensor:
    return _clamp(torch.round(centred.to(torch.float32) * _f32(multiplier)), zero_point, 0, 255)


def _like(q: Tensor, out: Tensor) -> Tensor:
    return out.as_strided(q.shape, q.stride()) if out.stride() == q.stride() else torch.empty_like(q).copy_(out)


OPS: dict[str, Callable[..., Tensor]] = {
    "quantize": reference.quantize,
    "dequantize": reference.dequantize,
    "linear_u8s8_u8": reference.linear_u8s8_u8,
    "linear_u8s8_f32": reference.linear_u8s8_f32,
    "conv_u8s8_u8": reference_conv.conv_u8s8_u8,
    "conv_u8s8_f32": reference_conv.conv_u8s8_f32,
    "conv_transpose_u8s8_u8": reference_conv.conv_transpose_u8s8_u8,
    "conv_transpose_u8s8_f32": reference_conv.conv_transpose_u8s8_f32,
    "lookup": lookup,
    "add": add,
    "mul": mul,
    "matmul": matmul,
    "matmul_f32": matmul_f32,
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "adaptive_avg_pool": adaptive_avg_pool,
    "adaptive_max_pool": adaptive_max_pool,
    "mean": mean,
    "interpolate": interpolate,
    "pad": pad,
}
"""Every operator that a statically quantised model calls."""


def reference_kernel(name: str) -> Callable[[K], K]:
    """A decorator for the arithmetic of a kernel that is to be in the table of operators, under this name.

    Raises:
        ValueError: the table has one of this name.
    """

    def register(function: K) -> K:
        if OPS.setdefault(name, function) is not function:
            raise ValueError(f"kernel '{name}': expected a name that no kernel has, {OPS[name].__module__} has it")
        return function

    return register
