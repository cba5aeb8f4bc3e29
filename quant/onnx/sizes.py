"""Sizes in a file: numbers where they are the same in all calls, and int64 values of the file elsewhere."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from quant.onnx.graph_writer import Count, Dimension, GraphWriter, NotWritten

Number: TypeAlias = int | Dimension | Count
"""A size, or what is computed of sizes."""

ARITHMETIC: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "add": ("Add", operator.add),
    "sub": ("Sub", operator.sub),
    "mul": ("Mul", operator.mul),
    "floordiv": ("Div", operator.floordiv),  # of numbers that are not negative, as sizes are
    "mod": ("Mod", operator.mod),
}
"""Of whole numbers: the operator of ONNX, and Python's."""


def is_number(value: Any) -> bool:
    """Whether a held value is a number and no tensor."""
    return isinstance(value, (int, float, Dimension, Count))


def sizes_of(writer: GraphWriter, name: str, register: int) -> tuple[Number, ...]:
    """The sizes of a tensor of the file that has the shape of a value of the program."""
    shape = writer.shape(register)
    return tuple(Dimension(name, axis) if size is None else size for axis, size in enumerate(shape))


def vector(writer: GraphWriter, values: Sequence[Any]) -> str:
    """Numbers as one int64 tensor, (n,)."""
    if all(isinstance(one, int) for one in values):
        return writer.numbers(values, "sizes")
    parts = [scalar(writer, one) for one in values]
    return parts[0] if len(parts) == 1 else writer.node("Concat", *parts, axis=0)


def scalar(writer: GraphWriter, value: Any) -> str:
    """A whole number as an int64 tensor, (1,)."""
    if isinstance(value, Count):
        return value.name
    if isinstance(value, Dimension):
        tensor, axis = writer.origin(value)
        known = writer.held_sizes.get((tensor, axis))
        if known is None:
            known = writer.is_dtype(writer.node("Shape", tensor, start=axis, end=axis + 1), torch.int64)
            writer.held_sizes[tensor, axis] = known
        return known
    if isinstance(value, int):
        return writer.numbers([value], "size")
    raise NotWritten(f"computes with a {type(value).__name__} where a whole number is expected")


def computed(writer: GraphWriter, name: str, one: Any, other: Any) -> Any:
    """One of ARITHMETIC of two numbers."""
    op, in_python = ARITHMETIC[name]
    if not isinstance(one, (Dimension, Count)) and not isinstance(other, (Dimension, Count)):
        return in_python(one, other)
    return Count(writer.is_dtype(writer.node(op, scalar(writer, one), scalar(writer, other)), torch.int64))


def reshaped(writer: GraphWriter, name: str, sizes: Sequence[Any]) -> str:
    """A tensor in another shape; one of the sizes may be -1.

    A size that the source has in the same place is 0 in ONNX, and one that nothing else says is -1, so that few files
    have to compute with shapes.
    """

    def place(axis: int, size: Any) -> Any:
        same = isinstance(size, Dimension) and writer.origin(size) == writer.origin(Dimension(name, axis))
        return 0 if same else size

    target = [place(axis, size) for axis, size in enumerate(sizes)]
    unknown = [axis for axis, size in enumerate(target) if not isinstance(size, int)]
    if len(unknown) == 1 and -1 not in target:
        target[unknown[0]] = -1
    done = writer.node("Reshape", name, vector(writer, target))
    writer.is_dtype(done, writer.dtype(name))
    for axis, size in enumerate(sizes):
        if isinstance(size, Dimension):
            writer.note_size(done, axis, size)
    return done
