"""Linear layers whose input is quantised at each call, as nodes with the layer's own numbers.

ONNX's DynamicQuantizeLinear has one range for all rows of a call, and the layers here one for each. So each row's
range is computed by nodes (equations 3 and 4 of kernels/README.md), and its zero point is taken off the sums.
"""

from __future__ import annotations

import torch

from quant.kernels.scheme import SCALE_MIN
from quant.nn.linear import Linear
from quant.onnx.call import WrittenCall, writes_call
from quant.onnx.graph_writer import GraphWriter, NotWritten
from quant.runtime.layers.narrow_bytes import weight_in_bytes

TOP = 255.0


@writes_call("Linear", "Conv1D")
def _dynamic_linear(call: WrittenCall) -> str:
    """An int8 layer: integers where the runtime multiplies such, else reals with an int8 weight."""
    writer, module, x = call.writer, call.module, call.get(0, "input")
    if not isinstance(module, Linear):
        raise NotWritten(f"is a {type(module).__name__}, whose arithmetic is its own")
    if module.columns is not None:
        x = writer.node("Mul", x, writer.constant(module.columns, "columns"))
    weight = writer.constant(weight_in_bytes(module).t().contiguous(), "weight")
    if not writer.runtime.joins_dynamic or module.activation_bits != 8:
        done, integer, why = _of_reals(writer, module, x, weight), False, "MatMul of reals with an int8 weight"
    elif module.per_row:
        done, integer, why = _by_rows(writer, module, x, weight), True, "MatMulInteger: a range for each row"
    else:
        done, integer, why = _by_call(writer, module, x, weight), True, "DynamicQuantizeMatMul: one range for a call"
    done = done if module.bias is None else writer.node("Add", done, writer.constant(module.bias, "bias"))
    writer.tell(integer, why, "dynamic")
    return writer.same_sizes(done, x, count=call.rank() - 1)


def _zeros(writer: GraphWriter, module: Linear) -> str:
    return writer.constant(torch.zeros(len(module.scale), dtype=torch.int8), "weight_zero_point")


def _of_reals(writer: GraphWriter, module: Linear, x: str, weight: str) -> str:
    scale = writer.constant(module.scale, "weight_scale")
    real = writer.node("DequantizeLinear", weight, scale, _zeros(writer, module), axis=1)
    return writer.node("MatMul", x, real)


def _by_call(writer: GraphWriter, module: Linear, x: str, weight: str) -> str:
    q, scale, zero_point = writer.several("DynamicQuantizeLinear", x, outputs=3)
    sums = writer.node("MatMulInteger", q, weight, zero_point, _zeros(writer, module))
    scales = writer.node("Mul", scale, writer.constant(module.scale, "weight_scale"))
    return writer.node("Mul", writer.node("Cast", sums, to=1), scales)


def _by_rows(writer: GraphWriter, module: Linear, x: str, weight: str) -> str:
    """x = scale (q - zero), a row each: q W - zero times the sums of W's columns, in int32, times the scales."""
    if x not in writer.quantized_rows:
        writer.quantized_rows[x] = _rows(writer, x)
    q, scale, zero = writer.quantized_rows[x]
    sums = writer.node("MatMulInteger", q, weight)
    columns = weight_in_bytes(module).sum(dim=1, dtype=torch.int32)
    taken = writer.node("Mul", zero, writer.constant(columns, "column_sums"))
    exact = writer.node("Cast", writer.node("Sub", sums, taken), to=1)
    return writer.node("Mul", exact, writer.node("Mul", scale, writer.constant(module.scale, "weight_scale")))


def _rows(writer: GraphWriter, x: str) -> tuple[str, str, str]:
    """uint8 integers, float32 scales and int32 zero points of each row, the last two with a last dimension of 1."""

    def number(value: float) -> str:
        return writer.constant(torch.tensor(value, dtype=torch.float32), "number")

    def end(op: str, limit: str) -> str:
        return writer.node(limit, writer.node(op, x, axes=[-1], keepdims=1), number(0.0))

    low, high = end("ReduceMin", "Min"), end("ReduceMax", "Max")
    steps = [writer.node("Div", one, number(TOP)) for one in (high, low)]
    scale = writer.node("Max", writer.node("Sub", *steps), number(SCALE_MIN))
    inverse = writer.node("Div", number(1.0), scale)
    rounded = writer.node("Round", writer.node("Mul", low, inverse))
    zero = writer.node("Clip", writer.node("Neg", rounded), number(0.0), number(TOP))
    moved = writer.node("Add", writer.node("Round", writer.node("Mul", x, inverse)), zero)
    q = writer.node("Cast", writer.node("Clip", moved, number(0.0), number(TOP)), to=2)
    return q, scale, writer.node("Cast", zero, to=6)
