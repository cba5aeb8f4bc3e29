"""torch's interpolate as nodes, by factors that are known or to sizes that the file computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quant.onnx.graph_writer import Dimension, GraphWriter, NotWritten
from quant.onnx.sizes import scalar, vector

FLOAT, INT64 = 1, 7
"""Of onnx.TensorProto.DataType."""

RESIZE = {"nearest": "nearest", "linear": "linear", "bilinear": "linear", "trilinear": "linear"}
"""The modes of torch's interpolate in ONNX."""


def resize(writer: GraphWriter, name: str, source: int, out: int, options: Mapping[str, Any]) -> str:
    """A float32 tensor resized as torch's interpolate does.

    Args:
        options: its arguments, with `Dimension` and `Count` for sizes that differ between calls.
    """
    mode = options.get("mode") or "nearest"
    if mode not in RESIZE or options.get("antialias"):
        raise NotWritten(f"resizes in the mode '{mode}'{' with antialias' * bool(options.get('antialias'))}")
    factors = options.get("scale_factor")
    before, after = writer.shape(source)[2:], writer.shape(out)[2:]
    if factors is None or options.get("recompute_scale_factor"):
        if not all(before) or not all(after):
            return _resized_to(writer, name, options, len(before))
        factors = [new / old for new, old in zip(after, before, strict=True) if new and old]
    factors = list(factors) if isinstance(factors, (tuple, list)) else [factors] * len(before)
    scales = writer.constant(torch.tensor([1.0, 1.0, *factors], dtype=torch.float32), "scales")
    if RESIZE[mode] == "nearest":
        settings = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        done = writer.node("Resize", name, "", scales, mode="nearest", **settings)
    else:
        done = _linear(writer, [name, "", scales], options)
    return writer.same_sizes(done, name, count=2)


def _linear(writer: GraphWriter, inputs: Sequence[str], options: Mapping[str, Any]) -> str:
    """A linear Resize, whose corners are aligned where the options say so."""
    aligned = "align_corners" if options.get("align_corners") else "half_pixel"
    return writer.node("Resize", *inputs, mode="linear", coordinate_transformation_mode=aligned)


def _resized_to(writer: GraphWriter, name: str, options: Mapping[str, Any], dims: int) -> str:
    """To sizes that the file computes.

    The nearest value is gathered by torch's own index, floor(place * (before / after)) in float32: Resize divides by
    after / before, which is another integer for some sizes.
    """
    size = options.get("size")
    if size is None:
        raise NotWritten("resizes by a factor computed anew, to sizes that differ between calls; give the sizes")
    sizes = list(size) if isinstance(size, (tuple, list)) else [size] * dims
    kept = [Dimension(name, axis) for axis in (0, 1)]
    if RESIZE[options.get("mode") or "nearest"] == "nearest":
        done = name
        for axis, after in enumerate(sizes, 2):
            done = writer.node("Gather", done, _nearest(writer, Dimension(name, axis), after), axis=axis)
    else:
        done = _linear(writer, [name, "", "", vector(writer, [*kept, *sizes])], options)
    for axis, one in enumerate(sizes, 2):
        if isinstance(one, Dimension):
            writer.note_size(done, axis, one)
    return writer.same_sizes(done, name, count=2)


def _nearest(writer: GraphWriter, before: Any, after: Any) -> str:
    """The place before of each place after, int64 (after,)."""
    old, new = (scalar(writer, one) for one in (before, after))
    factor = writer.node("Div", *(writer.node("Cast", one, to=FLOAT) for one in (old, new)))
    ends = [writer.constant(torch.tensor(one), "number") for one in (0, 1)]
    places = writer.node("Range", ends[0], writer.node("Squeeze", new, writer.numbers([0], "axes")), ends[1])
    exact = writer.node("Floor", writer.node("Mul", writer.node("Cast", places, to=FLOAT), factor))
    last = writer.node("Sub", old, writer.numbers([1], "one"))
    return writer.node("Min", writer.node("Cast", exact, to=INT64), last)
