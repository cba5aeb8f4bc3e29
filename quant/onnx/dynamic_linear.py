"""Products whose input is quantised at each call, as nodes with the layer's own numbers.

ONNX's DynamicQuantizeLinear has one range for all rows of a call and 8 bits, and the layers here a range for each row.
So each row's range is computed by nodes (equations 3 and 4 of kernels/README.md), and its zero point is taken off the
sums. Of 16 bits each byte is a product of its own (equation 8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.kernels.scheme import SCALE_MIN
from quant.nn.linear import Linear
from quant.onnx.call import WrittenCall, writes_call
from quant.onnx.graph_writer import DynamicInput, GraphWriter, NotWritten
from quant.onnx.integer_weights import dequantized_weight, integer_weight
from quant.runtime.layers.narrow_bytes import weight_in_bytes

FLOAT, UINT8, INT32 = 1, 2, 6
"""Of onnx.TensorProto.DataType."""


@dataclass(frozen=True)
class DynamicProduct:
    """x times an int8 weight, without a bias (`reference.linear_dynamic`).

    Attributes:
        q_weight: int8, (N, K).
        scale: float32, (N,), of the weight.
        columns: float32, (K,), by which x is multiplied first; or None.
        bits: of x, 8 or 16.
        per_row: whether each row of x has a range of its own.
    """

    q_weight: Tensor
    scale: Tensor
    columns: Tensor | None = None
    bits: int = 8
    per_row: bool = True

    def written(self, writer: GraphWriter, x: str, source: int | None = None) -> tuple[str, str]:
        """The product, and what it is computed by.

        Args:
            source: the register that x is the value of, for comparisons with it.
        """
        if self.columns is not None:
            x = writer.node("Mul", x, writer.constant(self.columns, "columns"))
        if self.per_row or self.bits != 8:
            done, integers = self._by_rows(writer, x)
            why = "MatMulInteger: a range for each row" if self.per_row else "MatMulInteger: one range for a call"
        else:
            (done, integers), why = self._by_call(writer, x), "DynamicQuantizeMatMul: one range for a call"
        if self.bits == 8 and source is not None and integers not in writer.dynamic_inputs:
            writer.dynamic_inputs[integers] = DynamicInput(integers, source, self.columns, self.per_row)
        return done, why + ", two bytes a value" * (self.bits == 16)

    def of_reals(self, writer: GraphWriter, x: str) -> str:
        """The same with reals for x, where a runtime has no integer kernel of the above."""
        if self.columns is not None:
            x = writer.node("Mul", x, writer.constant(self.columns, "columns"))
        return writer.node("MatMul", x, dequantized_weight(writer, self.q_weight.t(), self.scale, 1))

    def _weight(self, writer: GraphWriter) -> tuple[str, list[str]]:
        """(K, N), and its zero point where that is not 0, as MatMulInteger takes it."""
        weight, zero_point = integer_weight(writer, self.q_weight.t())
        return weight, [writer.constant(zero_point, "weight_zero_point")] if int(zero_point) else []

    def _by_call(self, writer: GraphWriter, x: str) -> tuple[str, str]:
        q, scale, zero_point = writer.several("DynamicQuantizeLinear", x, outputs=3)
        weight, weight_zero = integer_weight(writer, self.q_weight.t())
        zeros = writer.constant(weight_zero.repeat(len(self.scale)), "weight_zero_point")
        sums = writer.node("MatMulInteger", q, weight, zero_point, zeros)
        scales = writer.node("Mul", scale, writer.constant(self.scale, "weight_scale"))
        return writer.node("Mul", writer.node("Cast", sums, to=FLOAT), scales), q

    def _by_rows(self, writer: GraphWriter, x: str) -> tuple[str, str]:
        """x = scale (q - zero), a row each: q W - zero times the sums of W's columns, in int32, times the scales."""
        key = x, self.bits, self.per_row
        if key not in writer.quantized_rows:
            writer.quantized_rows[key] = _rows(writer, x, self.bits, per_row=self.per_row)
        parts, scale, zeros = writer.quantized_rows[key]
        weight, weight_zero = self._weight(writer)
        columns = writer.constant(self.q_weight.sum(dim=1, dtype=torch.int32), "column_sums")

        def sums(q: str, zero: str) -> str:
            """float32, exact in int32 before."""
            whole = writer.node("MatMulInteger", q, weight, *([""] if weight_zero else []), *weight_zero)
            return writer.node("Cast", writer.node("Sub", whole, writer.node("Mul", zero, columns)), to=FLOAT)

        done = sums(parts[0], zeros[0])
        for q, zero in zip(parts[1:], zeros[1:], strict=True):
            done = writer.node("Add", writer.node("Mul", done, _number(writer, 256.0)), sums(q, zero))
        scales = writer.node("Mul", scale, writer.constant(self.scale, "weight_scale"))
        return writer.node("Mul", done, scales), parts[0]


@writes_call("Linear", "Conv1D")
def _dynamic_linear(call: WrittenCall) -> str:
    """An int8 layer: integers where the runtime multiplies such, else reals with an int8 weight."""
    writer, module, x = call.writer, call.module, call.get(0, "input")
    if not isinstance(module, Linear):
        raise NotWritten(f"is a {type(module).__name__}, whose arithmetic is its own")
    product = DynamicProduct(
        weight_in_bytes(module), module.scale, module.columns, module.activation_bits, module.per_row
    )
    integer = writer.runtime.joins_dynamic
    if integer:
        done, why = product.written(writer, x, call.source())
    else:
        done, why = product.of_reals(writer, x), "MatMul of reals with an int8 weight"
    done = done if module.bias is None else writer.node("Add", done, writer.constant(module.bias, "bias"))
    writer.tell(integer, why, "dynamic")
    return writer.same_sizes(done, x, count=call.rank() - 1)


def _number(writer: GraphWriter, value: float) -> str:
    return writer.constant(torch.tensor(value, dtype=torch.float32), "number")


def _rows(writer: GraphWriter, x: str, bits: int, *, per_row: bool) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """uint8 integers, float32 scales and int32 zero points of each row, the latter with a last dimension of 1.

    Of 16 bits there are two integers and two zero points, the high bytes first.
    """
    top = float(2**bits - 1)

    def end(op: str, limit: str) -> str:
        reduced = writer.node(op, x, axes=[-1], keepdims=1) if per_row else writer.node(op, x, keepdims=1)
        return writer.node(limit, reduced, _number(writer, 0.0))

    low, high = end("ReduceMin", "Min"), end("ReduceMax", "Max")
    steps = [writer.node("Div", one, _number(writer, top)) for one in (high, low)]
    scale = writer.node("Max", writer.node("Sub", *steps), _number(writer, SCALE_MIN))
    inverse = writer.node("Div", _number(writer, 1.0), scale)
    rounded = writer.node("Round", writer.node("Mul", low, inverse))
    zero = writer.node("Clip", writer.node("Neg", rounded), _number(writer, 0.0), _number(writer, top))
    moved = writer.node("Add", writer.node("Round", writer.node("Mul", x, inverse)), zero)
    q = writer.node("Clip", moved, _number(writer, 0.0), _number(writer, top))
    pairs = [(one, _bytes(writer, one) if bits == 16 else [one]) for one in (q, zero)]
    integers = tuple(writer.node("Cast", one, to=UINT8) for one in pairs[0][1])
    return integers, scale, tuple(writer.node("Cast", one, to=INT32) for one in pairs[1][1])


def _bytes(writer: GraphWriter, whole: str) -> list[str]:
    """Whole numbers below 65536 as their high and low bytes, all of them float32."""
    high = writer.node("Floor", writer.node("Mul", whole, _number(writer, 1 / 256)))
    return [high, writer.node("Sub", whole, writer.node("Mul", high, _number(writer, 256.0)))]
