"""torch's interpolate as nodes, by factors that are known or to sizes that the file computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quant.onnx.graph_writer import Dimension, GraphWriter, NotWritten
from quant.onnx.load_resizes import has_numbers_of_torch
from quant.onnx.sizes import scalar, vector

FLOAT, INT64, DOUBLE = 1, 7, 11
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
        sizes = [(old, new) for old, new in zip(before, after, strict=True) if old and new]
        if len(sizes) < len(before):
            return _resized_to(writer, name, options, len(before))
        factors = [new / old for old, new in sizes]
        if RESIZE[mode] == "nearest" and not all(has_places_of_torch(*both) for both in sizes):
            return _resized_to(writer, name, {**options, "size": [new for _, new in sizes]}, len(before))
    factors = list(factors) if isinstance(factors, (tuple, list)) else [factors] * len(before)
    if RESIZE[mode] == "nearest" and not all(map(has_numbers_of_torch, factors)):
        return _gathered(writer, name, factors)
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


def _gathered(writer: GraphWriter, name: str, factors: Sequence[float]) -> str:
    """The nearest values by factors for which ONNX Runtime has other sizes or places than torch now and then."""
    done = name
    for axis, factor in enumerate(factors, 2):
        if factor == 1:
            continue
        old = scalar(writer, Dimension(name, axis))
        exact = writer.constant(torch.tensor([factor], dtype=torch.float64), "factor")
        new = writer.node("Floor", writer.node("Mul", writer.node("Cast", old, to=DOUBLE), exact))
        new = writer.node("Cast", new, to=INT64)
        apart = _number(writer, 1 / factor)
        if len(factors) == 2:  # as torch does with images alone, whatever the factor is
            twice = writer.node("Equal", new, writer.node("Mul", old, writer.numbers([2], "two")))
            apart = writer.node("Where", twice, _number(writer, 0.5), apart)
            apart = writer.node("Where", writer.node("Equal", new, old), _number(writer, 1.0), apart)
        places = _places(writer, old, new, apart)
        done = writer.node("Gather", done, places, axis=axis)
    return writer.same_sizes(done, name, count=2)


def _number(writer: GraphWriter, value: float) -> str:
    return writer.constant(torch.tensor([value], dtype=torch.float32), "number")


def has_places_of_torch(before: int, after: int) -> bool:
    """Whether ONNX Runtime gives this size, and reads the places that torch reads, by their quotient as a factor."""
    factor, inverse = (torch.tensor(one, dtype=torch.float32) for one in (after / before, before / after))
    numbers = torch.arange(after, dtype=torch.float32)
    return int(factor * before) == after and torch.equal((numbers / factor).floor(), (numbers * inverse).floor())


def _nearest(writer: GraphWriter, before: Any, after: Any) -> str:
    """The place before of each place after, int64 (after,), by the quotient of the sizes."""
    old, new = (scalar(writer, one) for one in (before, after))
    quotient = writer.node("Div", *(writer.node("Cast", one, to=FLOAT) for one in (old, new)))
    return _places(writer, old, new, quotient)


def _places(writer: GraphWriter, old: str, new: str, factor: str) -> str:
    """The place before of each place after, int64 (after,): each times a float32 `factor`, the input's per output."""
    ends = [writer.constant(torch.tensor(one), "number") for one in (0, 1)]
    places = writer.node("Range", ends[0], writer.node("Squeeze", new, writer.numbers([0], "axes")), ends[1])
    exact = writer.node("Floor", writer.node("Mul", writer.node("Cast", places, to=FLOAT), factor))
    last = writer.node("Sub", old, writer.numbers([1], "one"))
    return writer.node("Min", writer.node("Cast", exact, to=INT64), last)
