"""Int8 weights as constants of a file, and the form that processors without VNNI multiply exactly.

There ONNX Runtime adds two products of uint8 and int8 in 16 bits, which hold 255 (|v| + |w|) only up to 32767. Products
of uint8 and uint8 it adds in 32 bits, in more instructions. So a weight that can overflow is written for such
processors with 128 added and the zero point 128: other bytes, the same products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.onnx.graph_writer import GraphWriter

LARGEST_PAIRED = 32767 // (2 * 255)
"""The largest weight of which two times a uint8 fit 16 bits, whichever a runtime adds."""

UNSIGNED_ZERO = 128
"""The zero point of a uint8 weight."""


def overflows(q_weight: Tensor) -> bool:
    """Whether a sum of two of its products with a uint8 may not fit 16 bits."""
    return bool(q_weight.numel()) and int(q_weight.to(torch.int16).abs().max()) > LARGEST_PAIRED


def integer_weight(writer: GraphWriter, q_weight: Tensor, name: str = "weight") -> tuple[str, Tensor]:
    """A constant of a weight, int8 or uint8, and its zero point of the same dtype, ()."""
    if not overflows(q_weight):
        return writer.constant(q_weight.contiguous(), name), torch.tensor(0, dtype=torch.int8)
    if writer.target == "avx2" and writer.runtime.multiplies_unsigned:
        writer.unsigned.append(writer.step)
        unsigned = q_weight.to(torch.int16).add(UNSIGNED_ZERO).to(torch.uint8)
        return writer.constant(unsigned.contiguous(), name), torch.tensor(UNSIGNED_ZERO, dtype=torch.uint8)
    writer.overflowing.append(writer.step)
    return writer.constant(q_weight.contiguous(), name), torch.tensor(0, dtype=torch.int8)


def dequantized_weight(writer: GraphWriter, q_weight: Tensor, scale: Tensor, axis: int, name: str = "weight") -> str:
    """A weight as the reals of its integers, with a scale for each place of an axis."""
    weight, zero_point = integer_weight(writer, q_weight, name)
    known = (
        writer.constant(scale, f"{name}_scale"),
        writer.constant(zero_point.repeat(len(scale)), f"{name}_zero_point"),
    )
    return writer.node("DequantizeLinear", weight, *known, axis=axis)
