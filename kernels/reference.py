"""The oracle: every operator in plain torch arithmetic, written to be read.

Integers are exact (int64 sums, checked to fit int32); float operations are float32 in a fixed order, which every other
implementation repeats, so that a backend must give the same sums to the bit and the same uint8 within one step.
Equation numbers are those of kernels/README.md. Functions have the signatures of the operators in `ops.py`, less the
backend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from quant.kernels import narrow, reference_narrow
from quant.kernels.scheme import affine_qparams
from quant.kernels.transforms import constants
from torch import Tensor

MAX_K = (2**31 - 1 - 2**30) // (255 * 127)
"""Largest K whose sums fit int32 with room for a bias of up to 2**30."""

Product = Callable[[Tensor, Tensor], Tensor]
"""(q_x uint8 (rows, K), q_weight int8 (N, K)) -> int32 (rows, N), exact: the one thing that a backend must bring."""


def exact_product(q_x: Tensor, q_weight: Tensor) -> Tensor:
    """Equation 5: sum over i of q_x[m, i] * q_weight[n, i], zero points still in."""
    # float64 holds every integer below 2**53, and its matmul is far faster than int64's.
    return (q_x.to(torch.float64) @ q_weight.to(torch.float64).t()).to(torch.int32)


def quantize(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """float32 -> uint8 of the same shape (equation 2). Rounds half to even; NaN becomes zero_point.

    Raises:
        TypeError: x is of another dtype.
        ValueError: zero_point is no uint8.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"input is {x.dtype}, expected torch.float32")
    check_bytes(zero_point=zero_point)
    inverse = 1.0 / torch.tensor(scale, dtype=torch.float32)
    q = torch.round(constants(x, "quantize") * inverse)
    q = torch.where(torch.isnan(q), torch.zeros_like(q), q) + zero_point
    return q.clamp(0, 255).to(torch.uint8)


def dequantize(q: Tensor, scale: float, zero_point: int) -> Tensor:
    """uint8 -> float32 of the same shape, contiguous (equation 1)."""
    check_bytes(zero_point=zero_point)
    plain = q.contiguous().to(torch.int32)
    return (plain - zero_point).to(torch.float32) * torch.tensor(scale, dtype=torch.float32)


def requantize(sums: Tensor, multiplier: Tensor, zero_point: int, quant_min: int, quant_max: int) -> Tensor:
    """Map int32 sums to uint8 outputs (equation 7).

    Args:
        sums: int32, or whole numbers in float64, (..., N). Sums of products, zero points removed and bias added.
        multiplier: float32, () or (N,). s_x * s_w / s_y, each positive and finite.
        zero_point: of the output, in [quant_min, quant_max].
        quant_min, quant_max: of the output, in [0, 255]; a fused ReLU has quant_min = zero_point.

    Returns:
        uint8, shape of sums. Rounds half to even, as FBGEMM's nearbyint does.
    """
    check_bytes(zero_point=zero_point, quant_min=quant_min, quant_max=quant_max)
    if quant_min > quant_max:
        raise ValueError(f"quant_min is {quant_min}, above quant_max, {quant_max}")
    q = torch.round(sums.to(torch.float32) * multiplier) + float(zero_point)
    return q.clamp(quant_min, quant_max).to(torch.uint8)


def linear_u8s8_s32(
    q_x: Tensor, zero_point: int, q_weight: Tensor, q_bias: Tensor | None, *, product: Product = exact_product
) -> Tensor:
    """Exact sums (equations 5 and 6): sum over i of (q_x - zero_point) * q_weight, plus the bias.

    Args:
        q_x: uint8, (..., K).
        zero_point: of q_x.
        q_weight: int8, (N, K), K at most MAX_K; or narrow (`narrow`), of one scale per output.
        q_bias: int32 (N,) at scale s_x * s_w, or None.

    Returns:
        int32, (..., N).
    """
    check_linear(q_x, q_weight, torch.uint8)
    check_bytes(zero_point=zero_point)
    q_weight = narrow.as_bytes(q_weight)
    sums = product(_rows(q_x), q_weight) - zero_point * _row_sums(q_weight)
    if q_bias is not None:
        sums = sums + q_bias
    return sums.reshape(*q_x.shape[:-1], q_weight.shape[0])


def linear_u8s8_f32(
    q_x: Tensor,
    zero_point: int,
    q_weight: Tensor,
    q_bias: Tensor | None,
    multiplier: Tensor,
    *,
    product: Product = exact_product,
) -> Tensor:
    """`linear_u8s8_s32` times `multiplier` (s_x * s_w, float32 (N,)): float32 (..., N)."""
    return linear_u8s8_s32(q_x, zero_point, q_weight, q_bias, product=product).to(torch.float32) * multiplier


def linear_u8s8_u8(
    q_x: Tensor,
    zero_point: int,
    q_weight: Tensor,
    q_bias: Tensor | None,
    multiplier: Tensor,
    output_zero_point: int,
    quant_min: int,
    quant_max: int,
    *,
    product: Product = exact_product,
) -> Tensor:
    """`linear_u8s8_s32` requantised with s_x * s_w / s_y (float32 (N,)): uint8 (..., N)."""
    sums = linear_u8s8_s32(q_x, zero_point, q_weight, q_bias, product=product)
    return requantize(sums, multiplier, output_zero_point, quant_min, quant_max)


def check_bytes(**numbers: int) -> None:
    """Zero points and bounds of uint8 values, by their names, or a ValueError."""
    for name, number in numbers.items():
        if not 0 <= number <= 255:
            raise ValueError(f"{name} is {number}, expected 0 to 255")


def _rows(x: Tensor) -> Tensor:
    # Not reshape(-1, K), which is ambiguous where K is 0.
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def _row_sums(q_weight: Tensor) -> Tensor:
    return q_weight.sum(dim=1, dtype=torch.int32)


def row_ranges(x: Tensor, top: int, *, per_row: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point (float32, (rows, 1)) of each row of x (rows, K) for integers [0, top].

    A row that holds NaN or inf gets a scale of NaN, so that what is computed from it is NaN, as it would be in float.
    """
    finite = torch.isfinite(x).all(dim=1, keepdim=True)
    known = torch.where(finite, x, torch.zeros_like(x))
    # One column of zeros, because a range always contains zero and K may be 0.
    known = torch.cat([known, known.new_zeros(x.shape[0], 1)], dim=1)
    low, high = known.amin(dim=1, keepdim=True), known.amax(dim=1, keepdim=True)
    if not per_row and x.shape[0]:
        low, high = low.amin().expand_as(low), high.amax().expand_as(high)
        finite = finite.all().expand_as(finite)
    scale, zero_point = affine_qparams(low, high, 0, top)
    return torch.where(finite, scale, torch.full_like(scale, torch.nan)), zero_point * finite


def quantize_rows(x: Tensor, scale: Tensor, zero_point: Tensor, top: int) -> Tensor:
    """float32 (rows, K) -> int32 (rows, K) in [0, top], by the scale and zero point of each row (equation 2)."""
    q = torch.round(constants(x, "linear_dynamic") * (1.0 / scale))
    q = torch.where(torch.isnan(q), torch.zeros_like(q), q) + zero_point
    return q.clamp(0, top).to(torch.int32)


def linear_of_rows(
    x: Tensor,
    q_weight: Tensor,
    scale: Tensor,
    activation_bits: int,
    *,
    per_row: bool = True,
    product: Product = exact_product,
) -> Tensor:
    """x (rows, K) @ weight' as float32 (rows, N), through integers, before the bias (equations 6, 8 and 11)."""
    top = 2**activation_bits - 1
    row_scale, zero_point = row_ranges(x, top, per_row=per_row)
    q = quantize_rows(x, row_scale, zero_point, top)
    zero, by_group = zero_point.to(torch.int32), scale.dim() > 1
    bytes_of_weight = q_weight if by_group else narrow.as_bytes(q_weight)
    row_sums = None if by_group else _row_sums(bytes_of_weight)

    def sums(part: Tensor, zero_part: Tensor) -> Tensor:
        if row_sums is None:
            return reference_narrow.group_products(part, zero_part, q_weight, scale)
        return (product(part.to(torch.uint8), bytes_of_weight) - zero_part * row_sums).to(torch.float32)

    if activation_bits == 8:
        total = sums(q, zero)
    else:
        # Two bytes, each exact in int32; their weighted sum is float32, as int32 could not hold it.
        total = sums(q >> 8, zero >> 8) * 256.0 + sums(q & 255, zero & 255)
    return total * row_scale if by_group else total * (row_scale * scale)


def linear_dynamic(
    x: Tensor,
    q_weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    columns: Tensor | None = None,
    activation_bits: int = 8,
    per_row: bool = True,
    relu: bool = False,
    *,
    product: Product = exact_product,
) -> Tensor:
    """A float linear layer whose product is computed in integers, its activations quantised on the way.

    Args:
        x: float32, (..., K).
        q_weight: int8, (N, K), or narrow (`narrow`).
        scale: float32, (N,), of the weight; of a narrow one also by group.
        bias: float32, (N,), or None.
        columns: float32, (K,), or None: x is multiplied by it first, and the weight was divided by it.
        activation_bits: 8, or 16 as two bytes.
        per_row: a range per row of x, or one for all.
        relu: clamp below at 0.

    Returns:
        float32, (..., N). Rows that hold NaN or inf are NaN.
    """
    check_linear(x, q_weight, torch.float32)
    if scale.dtype != torch.float32 and not narrow.is_narrow(q_weight):
        raise TypeError(f"scale is {scale.dtype}, expected torch.float32")
    if narrow.is_narrow(q_weight):
        narrow.check(q_weight, scale)
        narrow.check_numbers(q_weight, scale)
    if activation_bits not in (8, 16):
        raise ValueError(f"activation_bits is {activation_bits}, expected 8 or 16")
    rows = _rows(x)
    if columns is not None:
        rows = rows * columns
    y = linear_of_rows(rows, q_weight, scale, activation_bits, per_row=per_row, product=product)
    if bias is not None:
        y = y + bias
    if relu:
        y = torch.where(y < 0, torch.zeros_like(y), y)
    return y.reshape(*x.shape[:-1], q_weight.shape[0])


def linear_dynamic_plain(x: Tensor, q_weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`linear_dynamic` with 8 bits, a range per row, no columns and no ReLU."""
    return linear_dynamic(x, q_weight, scale, bias)


def check_device(x: Tensor, other: Tensor, name: str) -> None:
    """Raise ValueError unless an operand lies where the input does; of one real one the result would be unwritten."""
    if x.device != other.device:
        raise ValueError(f"input is on {x.device} and {name} on {other.device}, expected one device")


def check_linear(x: Tensor, q_weight: Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise TypeError(f"input is {x.dtype}, expected {dtype}")
    check_device(x, q_weight, "q_weight")
    if not (q_weight.dtype == torch.int8 and q_weight.dim() == 2) and not (
        q_weight.dtype == torch.uint8 and q_weight.dim() == 3
    ):
        raise ValueError(
            f"q_weight must be int8 of shape (N, K), or narrow, got {q_weight.dtype} of shape {tuple(q_weight.shape)}"
        )
    columns = narrow.columns_of(q_weight)
    if x.dim() < 1 or x.shape[-1] != columns:
        raise ValueError(f"input has shape {tuple(x.shape)}, expected (..., {columns}) (in_features)")
    check_products(columns)


def check_products(count: int) -> None:
    """Raise ValueError where the sum of so many products may leave int32."""
    if count > MAX_K:
        raise ValueError(f"K is {count}; the sums of more than {MAX_K} products may overflow int32")
