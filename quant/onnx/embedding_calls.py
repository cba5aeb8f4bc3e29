"""Rows of tables, and bags of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quant.kernels.tables import groups_of_rows, unpack_rows
from quant.nn.embedding import Embedding, EmbeddingBag, TiedEmbedding
from quant.onnx.arithmetic_calls import as_tensor, cast
from quant.onnx.call import WrittenCall, writes_call
from quant.onnx.graph_writer import Dimension, GraphWriter, NotWritten
from quant.onnx.sizes import scalar
from quant.runtime.layers.narrow_bytes import weight_in_bytes

ENDLESS = 2**31 - 1
"""The end of a slice that has none."""


@writes_call("embedding")
def _embedding(call: WrittenCall) -> str:
    """F.embedding(indices, table): the indices are never padding in eval mode."""
    indices, table = call.get(0, "input"), call.get(1, "weight")
    if call.raw(3, "max_norm") is not None:
        raise NotWritten("embedding with a max_norm")
    return call.writer.same_sizes(call.writer.node("Gather", table, indices, axis=0), indices, count=call.rank())


@writes_call("Embedding", "TiedEmbedding")
def _int8_embedding(call: WrittenCall) -> str:
    done = _rows(call.writer, call.module, call.get(0, "input"))
    return call.writer.same_sizes(done, call.get(0, "input"), count=call.rank())


def _rows(writer: GraphWriter, module: nn.Module | None, indices: str) -> str:
    """Rows of reals; those of small integers are gathered and dequantised by the scale and bias of each row."""

    def gathered(tensor: Tensor, name: str) -> str:
        return writer.node("Gather", writer.constant(tensor, name), indices, axis=0)

    columns: Tensor | None = None
    if isinstance(module, TiedEmbedding):
        integers, scale, bias = weight_in_bytes(module), module.scale.unsqueeze(1), None
        columns = module.columns
    elif isinstance(module, (Embedding, EmbeddingBag)):
        integers, scale, bias = _rows_apart(module)
    elif type(module) is nn.EmbeddingBag and module.max_norm is None:
        return gathered(module.weight, "weight")
    else:
        raise NotWritten(f"is a {type(module).__name__}, whose arithmetic is its own")
    done = writer.node("Mul", writer.node("Cast", gathered(integers, "rows"), to=1), gathered(scale, "scale"))
    done = done if bias is None else writer.node("Add", done, gathered(bias, "bias"))
    return done if columns is None else writer.node("Mul", done, writer.constant(columns, "columns"))


def _rows_apart(table: Embedding | EmbeddingBag) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 (rows, dim), and float32 (rows, 1) scales and biases."""
    if groups_of_rows(table.rows.shape[1], table.embedding_dim, table.bits) > 1:
        raise NotWritten("is a table with scales by group; quantise it without group_size")
    tail = 8 if table.bits == 8 else 4
    numbers = table.rows[:, -tail:].clone().view(torch.float32 if table.bits == 8 else torch.float16).float()
    scale, bias = numbers[:, :1], numbers[:, 1:]
    reals = unpack_rows(table.rows, table.bits, table.embedding_dim)
    return torch.round((reals - bias) / scale).to(torch.uint8), scale, bias


@writes_call("EmbeddingBag")
def _bag(call: WrittenCall) -> str:
    """The rows of each bag, summed, averaged or compared; an empty bag is zeros."""
    writer, module, indices = call.writer, call.module, call.get(0, "input")
    offsets, weights = call.get(1, "offsets"), call.get(2, "per_sample_weights")
    assert isinstance(module, (EmbeddingBag, nn.EmbeddingBag))
    rows, last = _rows(writer, module, indices), writer.numbers([-1], "axes")
    kept = None
    if module.padding_idx is not None:
        padding = as_tensor(writer, int(module.padding_idx), writer.dtype(indices))
        is_padding = writer.is_dtype(writer.node("Equal", indices, padding), torch.bool)
        kept = writer.is_dtype(writer.node("Not", is_padding), torch.bool)
    if call.rank() == 1:
        inside = _bags(call, indices, offsets, bool(module.include_last_offset))
        kept = inside if kept is None else writer.is_dtype(writer.node("And", inside, kept), torch.bool)
        rows = writer.node("Unsqueeze", rows, writer.numbers([0], "axes"))  # (1, n, dim), and kept (bags, n)
    elif kept is None:
        kept = writer.is_dtype(writer.node("Equal", indices, indices), torch.bool)
    chosen = writer.is_dtype(writer.node("Unsqueeze", kept, last), torch.bool)
    count = writer.node("ReduceSum", cast(writer, chosen, torch.float32), writer.numbers([1], "axes"), keepdims=0)
    zero = writer.constant(torch.tensor(0.0), "zero")
    if module.mode == "max":
        lowest = writer.constant(torch.tensor(float("-inf")), "lowest")
        most = writer.node("ReduceMax", writer.node("Where", chosen, rows, lowest), axes=[1], keepdims=0)
        return writer.node("Where", writer.node("Equal", count, zero), zero, most)
    if weights is not None:
        rows = writer.node("Mul", rows, writer.node("Unsqueeze", weights, last))
    total = writer.node("ReduceSum", writer.node("Where", chosen, rows, zero), writer.numbers([1], "axes"), keepdims=0)
    if module.mode == "sum":
        return total
    return writer.node("Div", total, writer.node("Max", count, writer.constant(torch.tensor(1.0), "one")))


def _bags(call: WrittenCall, indices: str, offsets: str | None, has_last: bool) -> str:
    """Which of the indices is in which bag, (bags, n)."""
    writer = call.writer
    if offsets is None:
        raise NotWritten("is called with one dimension and no offsets")
    zero, first = writer.numbers([0], "axes"), writer.numbers([1], "start")
    length = scalar(writer, Dimension(indices, 0))
    starts = cast(writer, offsets, torch.int64)
    ends = writer.node("Slice", starts, first, writer.numbers([ENDLESS], "end"), zero)
    if has_last:
        starts = writer.node("Slice", starts, zero, writer.numbers([-1], "end"), zero)
    else:
        ends = writer.node("Concat", ends, length, axis=0)
    numbers = [writer.constant(torch.tensor(one), "number") for one in (0, 1)]
    place = writer.node("Range", numbers[0], writer.node("Squeeze", length, zero), numbers[1])
    starts, ends = (writer.node("Unsqueeze", one, first) for one in (starts, ends))
    after, before = writer.node("GreaterOrEqual", place, starts), writer.node("Less", place, ends)
    return writer.is_dtype(writer.node("And", after, before), torch.bool)
