"""Calls that compare values of a dimension: the largest, the first k, all in order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quant.onnx.arithmetic_calls import as_tensor, cast
from quant.onnx.call import WrittenCall, writes_call
from quant.onnx.graph_writer import Dimension, NotWritten
from quant.onnx.sizes import scalar


class Ordered(NamedTuple):
    """What torch gives: values and the places they come from, as names in the file."""

    values: str
    indices: str


def _top(call: WrittenCall, count: Any, dim: int, *, largest: bool, is_sorted: bool = True) -> Ordered:
    """The first of a dimension; alike ones in the order of their places."""
    writer, x, axis = call.writer, call.get(0, "input"), dim % max(call.rank(), 1)
    if call.rank() == 0:
        raise NotWritten(f"{call.name} of a number")
    dtype = writer.dtype(x)
    if dtype == torch.bool:
        raise NotWritten(f"{call.name} of truth values")
    found = writer.several("TopK", x, scalar(writer, count), outputs=2, axis=axis, largest=largest, sorted=is_sorted)
    for name, kind in zip(found, (dtype, torch.int64), strict=True):
        writer.is_dtype(name, kind)
        for other in range(call.rank()):
            if other != axis:
                writer.note_size(name, other, Dimension(x, other))
    return Ordered(*found)


@writes_call("topk")
def _topk(call: WrittenCall) -> Ordered:
    largest, is_sorted = bool(call.get(3, "largest", True)), bool(call.get(4, "sorted", True))
    return _top(call, call.get(1, "k"), call.get(2, "dim", -1), largest=largest, is_sorted=is_sorted)


@writes_call("sort", "argsort")
def _sort(call: WrittenCall) -> Any:
    dim = call.get(1, "dim", -1)
    size = call.shape()[dim]
    count = Dimension(call.get(0, "input"), dim % call.rank()) if size is None else size
    done = _top(call, count, dim, largest=bool(call.get(2, "descending", False)))
    return done if call.name == "sort" else done.indices


@writes_call("max", "min")
def _most(call: WrittenCall) -> Any:
    """Of two tensors, of all values, or of a dimension with the places."""
    writer, x = call.writer, call.get(0, "input")
    dim = call.get(1, "dim", call.get(1, "other"))
    if isinstance(dim, str):
        dtype = call.dtype or torch.float32
        both = [as_tensor(writer, one, dtype) for one in (x, dim)]
        return writer.node("Max" if call.name == "max" else "Min", *both)
    op = "ReduceMax" if call.name == "max" else "ReduceMin"
    if dim is None:
        return writer.node(op, x, keepdims=0)
    axis, keep = dim % call.rank(), bool(call.get(2, "keepdim", False))
    values = writer.is_dtype(writer.node(op, x, axes=[axis], keepdims=keep), writer.dtype(x))
    places = writer.node("ArgMax" if call.name == "max" else "ArgMin", x, axis=axis, keepdims=keep)
    return Ordered(values, writer.is_dtype(places, torch.int64))


@writes_call("argmax", "argmin")
def _place(call: WrittenCall) -> str:
    writer, x, dim = call.writer, call.get(0, "input"), call.get(1, "dim")
    op, keep = "ArgMax" if call.name == "argmax" else "ArgMin", bool(call.get(2, "keepdim", False))
    if dim is None:
        whole = writer.node("Reshape", cast(writer, x, writer.dtype(x)), writer.numbers([-1], "sizes"))
        return writer.is_dtype(writer.node(op, whole, axis=0, keepdims=0), torch.int64)
    return writer.is_dtype(writer.node(op, x, axis=dim % call.rank(), keepdims=keep), torch.int64)
