"""Calls that write values to places, or compute them: sums at indices, grids, and images read at them."""

from __future__ import annotations

from typing import Any

import torch

from quant.onnx.arithmetic_calls import as_tensor, cast
from quant.onnx.call import WrittenCall, writes_call
from quant.onnx.graph_writer import Dimension, NotWritten
from quant.onnx.moves import like
from quant.onnx.sizes import reshaped, scalar, vector


@writes_call("scatter_add")
def _scatter_add(call: WrittenCall) -> str:
    writer, x = call.writer, call.get(0, "input")
    index, source = cast(writer, call.get(2, "index"), torch.int64), call.get(3, "src")
    axis = call.get(1, "dim") % call.rank()
    source = _cut_to(call, source, index)
    done = writer.node("ScatterElements", x, index, source, axis=axis, reduction="add")
    return writer.same_sizes(like(call, done, x), x)


def _cut_to(call: WrittenCall, source: str, index: str) -> str:
    """The values that have an index: torch takes more of them than indices."""
    if call.shape(3, "src") == call.shape(2, "index"):
        return source
    writer, rank = call.writer, call.rank(2, "index")
    ends = vector(writer, [Dimension(index, axis) for axis in range(rank)])
    starts, axes = writer.numbers([0] * rank, "starts"), writer.numbers(range(rank), "axes")
    return writer.is_dtype(writer.node("Slice", source, starts, ends, axes), writer.dtype(source))


@writes_call("index_add")
def _index_add(call: WrittenCall) -> str:
    """Rows at places of the first dimension."""
    writer, x = call.writer, call.get(0, "input")
    if call.get(1, "dim") % call.rank() or call.raw(4, "alpha") not in (None, 1):
        raise NotWritten("index_add along another dimension than the first, or with an alpha")
    places = writer.node("Unsqueeze", cast(writer, call.get(2, "index"), torch.int64), writer.numbers([1], "axes"))
    done = writer.node("ScatterND", x, places, call.get(3, "source"), reduction="add")
    return writer.same_sizes(like(call, done, x), x)


@writes_call("linspace")
def _linspace(call: WrittenCall) -> str:
    """start + i step below the middle and end - (n - 1 - i) step from there on, as torch computes it."""
    writer, (start, end, steps) = call.writer, [call.get(k, name) for k, name in enumerate(("start", "end", "steps"))]
    dtype = call.dtype or torch.float32
    if not all(isinstance(one, (int, float)) for one in (start, end)):
        raise NotWritten("linspace between what is computed")
    if isinstance(steps, int):
        return writer.constant(torch.linspace(start, end, steps, dtype=dtype), "line")
    zero, one = (writer.constant(torch.tensor(k), "number") for k in (0, 1))
    count = writer.node("Squeeze", scalar(writer, steps), writer.numbers([0], "axes"))
    index = writer.node("Range", zero, count, one)
    last = writer.is_dtype(writer.node("Sub", count, one), torch.int64)
    gaps = writer.is_dtype(writer.node("Max", last, one), torch.int64)
    step = writer.node("Div", as_tensor(writer, float(end) - float(start), dtype), cast(writer, gaps, dtype))
    back = writer.is_dtype(writer.node("Sub", last, index), torch.int64)
    ahead = cast(writer, writer.is_dtype(index, torch.int64), dtype)
    low = writer.node("Add", as_tensor(writer, float(start), dtype), writer.node("Mul", ahead, step))
    high = writer.node("Sub", as_tensor(writer, float(end), dtype), writer.node("Mul", cast(writer, back, dtype), step))
    below = writer.node("Less", writer.node("Add", index, index), gaps)  # also of a line of one, which is the start
    done = writer.node("Where", below, low, high)
    if isinstance(steps, Dimension):
        writer.note_size(done, 0, steps)
    return done


@writes_call("tril_indices", "triu_indices")
def _triangle(call: WrittenCall) -> str:
    row, col, offset = call.get(0, "row"), call.get(1, "col"), call.get(2, "offset", 0)
    if not all(isinstance(one, int) for one in (row, col, offset)):
        raise NotWritten("lists a triangle of a size that differs between calls")
    made = torch.tril_indices if call.name == "tril_indices" else torch.triu_indices
    return call.writer.constant(made(row, col, offset), "triangle")


@writes_call("meshgrid")
def _meshgrid(call: WrittenCall) -> tuple[str, ...]:
    """Each vector along its own dimension, and the same along all others."""
    writer, lines = call.writer, call.rest(0, "tensors")
    swaps = call.kwargs.get("indexing", "ij") == "xy" and len(lines) > 1
    order = [1, 0, *range(2, len(lines))] if swaps else list(range(len(lines)))
    sizes = [Dimension(lines[k], 0) for k in order]
    grids = []
    for k, line in enumerate(lines):
        shape: list[Any] = [1] * len(lines)
        shape[order.index(k)] = -1
        raised = writer.is_dtype(reshaped(writer, line, shape), writer.dtype(line))
        done = writer.is_dtype(writer.node("Expand", raised, vector(writer, sizes)), writer.dtype(line))
        for axis, size in enumerate(sizes):
            writer.note_size(done, axis, size)
        grids.append(done)
    return tuple(grids)


@writes_call("grid_sample")
def _grid_sample(call: WrittenCall) -> str:
    mode, outside = call.get(2, "mode", "bilinear"), call.get(3, "padding_mode", "zeros")
    if call.rank() != 4:
        raise NotWritten("samples what is no batch of images")
    aligned = bool(call.get(4, "align_corners", False))
    return call.writer.node(
        "GridSample", call.get(0, "input"), call.get(1, "grid"), mode=mode, padding_mode=outside, align_corners=aligned
    )


@writes_call("cosine_similarity")
def _cosine(call: WrittenCall) -> str:
    """Of two tensors of one rank: their product over both norms, of which none is below eps."""
    writer, a, b = call.writer, call.get(0, "x1"), call.get(1, "x2")
    rank = call.rank(0, "x1")
    if rank != call.rank(1, "x2"):
        raise NotWritten("compares tensors of different ranks")
    axis = call.get(2, "dim", 1) % rank
    least = writer.constant(torch.tensor(float(call.get(3, "eps", 1e-8))), "eps")

    def unit(x: str) -> str:
        return writer.node("Div", x, writer.node("Max", writer.node("ReduceL2", x, axes=[axis], keepdims=1), least))

    units = unit(a), unit(b)
    return writer.node("ReduceSum", writer.node("Mul", *units), writer.numbers([axis], "axes"), keepdims=0)


@writes_call("_weight_norm")
def _weight_norm(call: WrittenCall) -> str:
    """g v / |v|, of two constants."""
    writer, dim = call.writer, call.get(2, "dim", 0)
    v, g = (writer.constants.get(call.get(place, name)) for place, name in ((0, "v"), (1, "g")))
    if v is None or g is None:
        raise NotWritten("normalises a weight that is computed")
    return writer.constant(torch._weight_norm(v, g, dim), "weight")
