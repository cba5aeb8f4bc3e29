"""Adaptive average pools as products with matrices of ones, for windows of unlike sizes and sizes that vary.

ONNX has no such operator. Window k of n values in o windows begins at floor(k n / o) and ends before
ceil((k + 1) n / o), as torch defines it, so a pool is a sum over each dimension in turn and one division by the counts.
Of integers the sums are exact in float32 (below 2**24, which is 255 for each of 65,000 pixels).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quant.onnx.graph_writer import Dimension, GraphWriter
from quant.onnx.sizes import reshaped, scalar

FLOAT = 1
"""Of onnx.TensorProto.DataType."""


def adaptive_mean(writer: GraphWriter, x: str, before: Sequence[int | None], size: Sequence[int | None]) -> str:
    """The mean of float32 x over adaptive windows of its last dimensions.

    Args:
        before: the sizes of these dimensions, None where they differ between calls.
        size: how many windows each has; None for as many as values.
    """
    dims, counts = len(size), []
    for back in range(1, dims + 1):  # always the last dimension, which then becomes the first of them
        windows = size[-back]
        if windows is not None:
            length: Any = before[-back]
            ones, count = _windows(writer, Dimension(x, 1 + dims) if length is None else length, windows)
            x = writer.node("MatMul", x, ones)
            counts.append(reshaped(writer, count, (windows, *[1] * (back - 1))))
        if dims > 1:
            x = writer.node("Transpose", x, perm=[0, 1, 1 + dims, *range(2, 1 + dims)])
    for count in counts:
        x = writer.node("Div", x, count)
    return x


def _windows(writer: GraphWriter, length: Any, windows: int) -> tuple[str, str]:
    """float32 (length, windows), 1 where a value is in a window, and the values of each, (1, windows)."""
    if isinstance(length, int):
        return _fixed_windows(writer, length, windows)
    size, several = scalar(writer, length), writer.numbers([windows], "windows")
    k = torch.arange(windows, dtype=torch.int64)[None]
    first = writer.node("Div", writer.node("Mul", writer.constant(k, "window"), size), several)
    past = writer.node("Mul", writer.constant(k + 1, "window"), size)
    end = writer.node("Div", writer.node("Add", past, writer.numbers([windows - 1], "up")), several)
    ends = [writer.constant(torch.tensor(one), "number") for one in (0, 1)]
    whole = writer.node("Squeeze", size, writer.numbers([0], "axes"))
    place = writer.node("Unsqueeze", writer.node("Range", ends[0], whole, ends[1]), writer.numbers([1], "axes"))
    inside = writer.node("And", writer.node("GreaterOrEqual", place, first), writer.node("Less", place, end))
    return writer.node("Cast", inside, to=FLOAT), writer.node("Cast", writer.node("Sub", end, first), to=FLOAT)


def _fixed_windows(writer: GraphWriter, length: int, windows: int) -> tuple[str, str]:
    k, place = torch.arange(windows)[None], torch.arange(length)[:, None]
    first, end = k * length // windows, ((k + 1) * length + windows - 1) // windows
    ones = ((place >= first) & (place < end)).to(torch.float32)
    return writer.constant(ones, "windows"), writer.constant((end - first).to(torch.float32), "counts")
