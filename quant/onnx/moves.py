"""Calls that only move values, on reals and on integers alike: a function for each, by the call's name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quant.onnx.call import WriteCall, WrittenCall
from quant.onnx.graph_writer import MOST_DIMENSIONS, Count, Dimension, GraphWriter, NotWritten
from quant.onnx.sizes import Number, computed, reshaped, scalar, sizes_of, vector
from quant.runtime.trees import Ref

MOVES: dict[str, WriteCall] = {}
ENDLESS = 2**31 - 1
"""The end of a slice that has none."""


def moves(*names: str) -> Callable[[WriteCall], WriteCall]:
    """Register a function for calls of these names."""

    def add(function: WriteCall) -> WriteCall:
        MOVES.update(dict.fromkeys(names, function))
        return function

    return add


def like(call: WrittenCall, name: str, source: str) -> str:
    """A tensor with the dtype of another; gives its name."""
    return call.writer.is_dtype(name, call.writer.dtype(source))


@moves("identity", "dropout", "contiguous", "clone", "detach", "requires_grad")
def _identity(call: WrittenCall) -> Any:
    if call.name == "dropout" and call.raw(2, "training", False) is True:
        raise NotWritten("drops values, also in eval mode")
    return call.get(0, "input")


@moves("flatten")
def _flatten(call: WrittenCall) -> str:
    x, rank = call.get(0, "input"), call.rank()
    start, end = call.get(1, "start_dim", 0) % max(rank, 1), call.get(2, "end_dim", -1) % max(rank, 1)
    if rank == 0 or start == end:
        return x if rank else reshaped(call.writer, x, (1,))
    if (start, end) == (1, rank - 1):
        done = like(call, call.writer.node("Flatten", x, axis=1), x)
        return call.writer.same_sizes(done, x, count=1)
    sizes = sizes_of(call.writer, x, call.source())
    return reshaped(call.writer, x, (*sizes[:start], _product(sizes[start : end + 1]), *sizes[end + 1 :]))


def _product(sizes: Sequence[Number]) -> Number:
    return math.prod(one for one in sizes if isinstance(one, int)) if all(isinstance(s, int) for s in sizes) else -1


@moves("unflatten")
def _unflatten(call: WrittenCall) -> str:
    x, rank = call.get(0, "input"), call.rank()
    dim = call.get(1, "dim") % rank
    sizes = sizes_of(call.writer, x, call.source())
    return reshaped(call.writer, x, (*sizes[:dim], *call.rest(2, "sizes"), *sizes[dim + 1 :]))


@moves("reshape")
def _reshape(call: WrittenCall) -> str:
    sizes = call.rest(1, "shape")
    if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
        raise NotWritten("views the bytes of another dtype")
    return reshaped(call.writer, call.get(0, "input"), sizes)


@moves("reshape_as")
def _reshape_as(call: WrittenCall) -> str:
    other = call.source(1, "other")
    return reshaped(call.writer, call.get(0, "input"), sizes_of(call.writer, call.get(1, "other"), other))


@moves("permute")
def _permute(call: WrittenCall) -> str:
    return _transposed(call, [one % call.rank() for one in call.rest(1, "dims")])


@moves("transpose")
def _transpose(call: WrittenCall) -> str:
    rank = call.rank()
    one = call.get(1, "dim0", call.raw(1, "axis0")) % rank
    other = call.get(2, "dim1", call.raw(2, "axis1")) % rank
    dims = list(range(rank))
    dims[one], dims[other] = other, one
    return _transposed(call, dims)


@moves("t", "adjoint", "getattr.T", "getattr.mT")
def _last_two(call: WrittenCall) -> str:
    rank = call.rank()
    return _transposed(call, [*range(rank - 2), *reversed(range(max(rank - 2, 0), rank))])


@moves("movedim", "moveaxis")
def _movedim(call: WrittenCall) -> str:
    rank = call.rank()
    ends = [call.get(place, name) for place, name in ((1, "source"), (2, "destination"))]
    sources, targets = ([one] if isinstance(one, int) else list(one) for one in ends)
    moved = {target % rank: source % rank for source, target in zip(sources, targets, strict=True)}
    others = iter(axis for axis in range(rank) if axis not in moved.values())
    return _transposed(call, [moved[axis] if axis in moved else next(others) for axis in range(rank)])


def _transposed(call: WrittenCall, dims: Sequence[int]) -> str:
    writer = call.writer
    x: str = call.get(0, "input")
    if list(dims) == list(range(len(dims))):
        return x
    done = like(call, writer.node("Transpose", x, perm=list(dims)), x)
    for axis, dim in enumerate(dims):
        writer.note_size(done, axis, Dimension(x, dim))
    return done


@moves("unsqueeze")
def _unsqueeze(call: WrittenCall) -> str:
    x, rank = call.get(0, "input"), call.rank()
    dim = call.get(1, "dim") % (rank + 1)
    done = like(call, call.writer.node("Unsqueeze", x, call.writer.numbers([dim], "axes")), x)
    for axis in range(rank):
        call.writer.note_size(done, axis + (axis >= dim), Dimension(x, axis))
    return done


@moves("squeeze")
def _squeeze(call: WrittenCall) -> str:
    x, shape = call.get(0, "input"), call.shape()
    asked = call.rest(1, "dim") or range(len(shape))
    dims = [one % len(shape) for one in asked if shape[one] == 1]
    if any(shape[one] is None for one in asked):
        raise NotWritten("squeezes a dimension whose size differs between calls")
    return without(call.writer, x, dims, len(shape))


def without(writer: GraphWriter, x: str, dims: Sequence[int], rank: int) -> str:
    """A tensor without some dimensions, whose size is 1."""
    if not dims:
        return x
    done = writer.is_dtype(writer.node("Squeeze", x, writer.numbers(sorted(dims), "axes")), writer.dtype(x))
    for place, axis in enumerate(axis for axis in range(rank) if axis not in dims):
        writer.note_size(done, place, Dimension(x, axis))
    return done


@moves("expand", "broadcast_to")
def _expand(call: WrittenCall) -> str:
    x, rank = call.get(0, "input"), call.rank()
    sizes = call.rest(1, "size")
    ahead = len(sizes) - rank
    target = [
        1 if isinstance(size, int) and size == -1 else size for size in sizes
    ]  # of 1, ONNX keeps the size that is there
    done = like(call, call.writer.node("Expand", x, vector(call.writer, target)), x)
    for axis, size in enumerate(sizes):
        if isinstance(size, Dimension):
            call.writer.note_size(done, axis, size)
        elif size == -1 and axis >= ahead:
            call.writer.note_size(done, axis, Dimension(x, axis - ahead))
    return done


@moves("expand_as")
def _expand_as(call: WrittenCall) -> str:
    x, other = call.get(0, "input"), call.get(1, "other")
    sizes = sizes_of(call.writer, other, call.source(1, "other"))
    return call.writer.same_sizes(like(call, call.writer.node("Expand", x, vector(call.writer, sizes)), x), other)


@moves("repeat")
def _repeat(call: WrittenCall) -> str:
    x, rank, times = call.get(0, "input"), call.rank(), call.rest(1, "repeats")
    if len(times) > rank:
        x = reshaped(call.writer, x, (*[1] * (len(times) - rank), *sizes_of(call.writer, x, call.source())))
    return like(call, call.writer.node("Tile", x, vector(call.writer, times)), x)


@moves("cat")
def _cat(call: WrittenCall) -> str:
    """Torch leaves out empty tensors of one dimension, as a cache begins with."""
    listed = call.raw(0, "tensors")
    empty = [isinstance(one, Ref) and call.writer.shape(one.index) == (0,) for one in listed]
    parts = [call.take(one) for one, without in zip(listed, empty, strict=True) if not without]
    if not parts:
        raise NotWritten("joins empty tensors")
    axis = call.get(1, "dim", call.raw(1, "axis", 0))
    if len(parts) == 1:
        return parts[0]  # type: ignore[no-any-return]
    return like(call, call.writer.node("Concat", *parts, axis=axis), parts[0])


@moves("stack")
def _stack(call: WrittenCall) -> str:
    writer, parts = call.writer, [*call.get(0, "tensors")]
    rank = len(writer.shape(call.out)) if call.dtype is not None else 0
    dim = call.get(1, "dim", 0) % rank
    raised = [writer.node("Unsqueeze", one, writer.numbers([dim], "axes")) for one in parts]
    return like(call, writer.node("Concat", *raised, axis=dim), parts[0])


@moves("flip")
def _flip(call: WrittenCall) -> str:
    x: str = call.get(0, "input")
    for dim in call.rest(1, "dims"):
        x = cut(call.writer, x, dim % call.rank(), -1, -ENDLESS, -1)
    return x


@moves("roll")
def _roll(call: WrittenCall) -> str:
    x: str = call.get(0, "input")
    shape = call.shape()
    shifts, dims = (
        [one] if isinstance(one, int) else list(one) for one in (call.get(1, "shifts"), call.get(2, "dims"))
    )
    for shift, dim in zip(shifts, dims, strict=True):
        size = shape[dim]
        if size is None or not isinstance(shift, int):
            raise NotWritten("rolls a dimension whose size differs between calls")
        start = -shift % size
        if start:
            axis = dim % len(shape)
            ends = [cut(call.writer, x, axis, start, ENDLESS), cut(call.writer, x, axis, 0, start)]
            x = like(call, call.writer.node("Concat", *ends, axis=axis), x)
    return x


@moves("narrow")
def _narrow(call: WrittenCall) -> str:
    dim, start, length = (call.get(place, name) for place, name in ((1, "dim"), (2, "start"), (3, "length")))
    end = computed(call.writer, "add", start, length)
    return cut(call.writer, call.get(0, "input"), dim % call.rank(), start, end)


@moves("select")
def _select(call: WrittenCall) -> str:
    dim = call.get(1, "dim") % call.rank()
    return _picked(call.writer, call.get(0, "input"), dim, call.get(2, "index"))


def cut(writer: GraphWriter, x: str, axis: int, start: Any, end: Any, step: int = 1) -> str:
    """A part of a dimension."""
    ends = [scalar(writer, one) for one in (start, end)]
    steps = [] if step == 1 else [writer.numbers([step], "steps")]
    done = writer.node("Slice", x, *ends, writer.numbers([axis], "axes"), *steps)
    for other in range(MOST_DIMENSIONS):
        if other != axis:
            writer.note_size(done, other, Dimension(x, other))
    return writer.is_dtype(done, writer.dtype(x))


def _picked(writer: GraphWriter, x: str, axis: int, index: Any) -> str:
    """One index of a dimension, which is gone then."""
    at = writer.constant(torch.tensor(index, dtype=torch.int64), "index") if isinstance(index, int) else None
    if at is None:
        at = writer.node("Squeeze", scalar(writer, index), writer.numbers([0], "axes"))
    return writer.is_dtype(writer.node("Gather", x, at, axis=axis), writer.dtype(x))


@moves("getitem")
def _getitem(call: WrittenCall) -> Any:
    writer, source, key = call.writer, call.get(0, "input"), call.get(1, "other")
    if not isinstance(source, str):  # a shape or a tuple of tensors
        if isinstance(source, (tuple, list)) and isinstance(key, (int, slice)):
            return source[key]
        raise NotWritten(f"takes {key!r} of what is no tensor")
    keys = list(key) if isinstance(key, (tuple, list)) else [key]
    rank = call.rank()
    if Ellipsis in [one for one in keys if one is Ellipsis]:
        place = next(place for place, one in enumerate(keys) if one is Ellipsis)
        taken = len([one for one in keys if one is not None and one is not Ellipsis])
        keys[place : place + 1] = [slice(None)] * (rank - taken)
    if len(keys) > 1 and all(isinstance(one, str) and writer.dtype(one) == torch.int64 for one in keys):
        return _at_places(writer, source, keys)
    if (first := _first_of_indices(writer, keys)) is not None:
        return _at_inner_places(call, source, keys, first)
    return _indexed(writer, source, keys)


def _first_of_indices(writer: GraphWriter, keys: Sequence[Any]) -> int | None:
    """Where several tensors of indices begin that stand side by side between whole dimensions; else None."""
    places = [place for place, one in enumerate(keys) if isinstance(one, str) and writer.dtype(one) == torch.int64]
    others = [one for place, one in enumerate(keys) if place not in places]
    if len(places) < 2 or places != list(range(places[0], places[-1] + 1)) or any(one != slice(None) for one in others):
        return None
    return places[0]


def _at_inner_places(call: WrittenCall, x: str, keys: Sequence[Any], first: int) -> str:
    """x[:, i, j]: the indexed dimensions in front, and what is found there back in their place."""
    writer, rank = call.writer, call.rank()
    indices = [one for one in keys if isinstance(one, str)]
    inner = list(range(first, first + len(indices)))
    others = [axis for axis in range(rank) if axis not in inner]
    ahead = writer.is_dtype(writer.node("Transpose", x, perm=[*inner, *others]), writer.dtype(x))
    found = _at_places(writer, ahead, indices)
    new = len(writer.shape(call.out)) - len(others)  # dimensions of the indices, which come first
    order = [*range(new, new + first), *range(new), *range(new + first, new + len(others))]
    return writer.is_dtype(writer.node("Transpose", found, perm=order), writer.dtype(x))


def _at_places(writer: GraphWriter, x: str, indices: Sequence[str]) -> str:
    """x[i, j, ...] with tensors of indices for the first dimensions, which broadcast to each other."""
    zero = writer.constant(torch.tensor(0, dtype=torch.int64), "zero")
    nothing = writer.node("Mul", indices[0], zero)
    for one in indices[1:]:
        nothing = writer.node("Add", nothing, writer.node("Mul", one, zero))
    last = writer.numbers([-1], "axes")
    places = [writer.node("Unsqueeze", writer.node("Add", one, nothing), last) for one in indices]
    return writer.is_dtype(writer.node("GatherND", x, writer.node("Concat", *places, axis=-1)), writer.dtype(x))


def _indexed(writer: GraphWriter, x: str, keys: Sequence[Any]) -> str:
    """x[keys]: slices and numbers, None for a new dimension, and one tensor of indices."""
    axis = 0
    for key in keys:
        if key is None:
            x = writer.is_dtype(writer.node("Unsqueeze", x, writer.numbers([axis], "axes")), writer.dtype(x))
            axis += 1
        elif isinstance(key, slice):
            if (key.start, key.stop, key.step) != (None, None, None):
                step = 1 if key.step is None else key.step
                if not isinstance(step, int) or step < 1:
                    raise NotWritten("takes every n-th value, n computed")
                end = ENDLESS if key.stop is None else key.stop
                x = cut(writer, x, axis, 0 if key.start is None else key.start, end, step)
            axis += 1
        elif isinstance(key, (int, Dimension, Count)) and not isinstance(key, bool):
            x = _picked(writer, x, axis, key)
        elif isinstance(key, str) and writer.dtype(key) in (torch.int64, torch.int32):
            if sum(isinstance(one, str) for one in keys) > 1:
                raise NotWritten("takes values by several tensors of indices")
            x = writer.is_dtype(writer.node("Gather", x, key, axis=axis), writer.dtype(x))
            axis += 1
        else:
            raise NotWritten(f"takes values by a {type(key).__name__}, expected numbers, slices, None or indices")
    return x


@moves("pixel_shuffle")
def _pixel_shuffle(call: WrittenCall) -> str:
    x, factor = call.get(0, "input"), call.get(1, "upscale_factor")
    if call.rank() != 4:
        raise NotWritten("shuffles pixels of what is no batch of images")
    done = like(call, call.writer.node("DepthToSpace", x, blocksize=factor, mode="CRD"), x)
    return call.writer.same_sizes(done, x, count=1)


@moves("index_select")
def _index_select(call: WrittenCall) -> str:
    x, dim = call.get(0, "input"), call.get(1, "dim") % call.rank()
    return like(call, call.writer.node("Gather", x, call.get(2, "index"), axis=dim), x)


@moves("gather")
def _gather(call: WrittenCall) -> str:
    x, index = call.get(0, "input"), call.get(2, "index")
    done = like(call, call.writer.node("GatherElements", x, index, axis=call.get(1, "dim") % call.rank()), x)
    return call.writer.same_sizes(done, index)


@moves("chunk")
def _chunk(call: WrittenCall) -> tuple[str, ...]:
    dim, count = call.get(2, "dim", 0) % call.rank(), call.get(1, "chunks")
    size = call.shape()[dim]
    if size is None:
        raise NotWritten("splits a dimension whose size differs between calls")
    return _split(call, dim, _parts(size, -(-size // count)))


@moves("split", "split_with_sizes", "tensor_split")
def _split_call(call: WrittenCall) -> tuple[str, ...]:
    dim, how = call.get(2, "dim", 0) % call.rank(), call.get(1, "split_size_or_sections", call.raw(1, "split_size"))
    size = call.shape()[dim]
    if call.name == "tensor_split" or (size is None and isinstance(how, int)):
        raise NotWritten("splits a dimension whose size differs between calls, or at given indices")
    return _split(call, dim, list(how) if not isinstance(how, int) or size is None else _parts(size, how))


@moves("unbind")
def _unbind(call: WrittenCall) -> tuple[str, ...]:
    rank = call.rank()
    dim = call.get(1, "dim", 0) % rank
    size = call.shape()[dim]
    if size is None:
        raise NotWritten("takes a dimension apart whose size differs between calls")
    return tuple(_picked(call.writer, call.get(0, "input"), dim, place) for place in range(size))


def _parts(size: int, each: int) -> list[int]:
    return [min(each, size - start) for start in range(0, size, each)]


def _split(call: WrittenCall, dim: int, sizes: Sequence[Any]) -> tuple[str, ...]:
    writer, x = call.writer, call.get(0, "input")
    if len(sizes) == 1:
        return (x,)
    parts = writer.several("Split", x, vector(writer, sizes), outputs=len(sizes), axis=dim)
    for part in parts:
        like(call, part, x)
        for axis in range(call.rank()):
            if axis != dim:
                writer.note_size(part, axis, Dimension(x, axis))
    return tuple(parts)
