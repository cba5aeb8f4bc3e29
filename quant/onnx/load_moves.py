"""The operators of ONNX that move values and compute with sizes, as lines of a plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quant.kernels.plan_sizes import Arithmetic
from quant.kernels.reference_plan import Register
from quant.onnx.file import Node
from quant.onnx.load_plan import OWN, NotTranslated, PlanWriter
from quant.onnx.load_registry import translates
from quant.onnx.load_values import (
    UNKNOWN,
    ChannelIntegers,
    ChannelRange,
    Dequantized,
    Held,
    Index,
    Integers,
    Range,
    Real,
    ShapeOf,
    Sizes,
    Value,
    Waiting,
    Weight,
)

ENDLESS = 2**31 - 1
"""Ends of slices from here on are none."""


@translates("Shape")
def _shape(plan: PlanWriter, node: Node) -> Value:
    """A part of a shape, or a whole one, of which parts are then taken."""
    register = plan.any_register(plan.value(node, 0), node)
    start, end = int(node.attributes.get("start", 0)), node.attributes.get("end")
    rank = plan.ranks[register]
    if rank is not None:
        return Sizes(tuple(Register(register, dim) for dim in range(rank)[start:end]))
    if end is not None and start >= 0 and end > start:
        return Sizes(tuple(Register(register, dim) for dim in range(start, int(end))))
    return ShapeOf(register, start, None if end is None else int(end))


def sizes(plan: PlanWriter, node: Node, place: int) -> tuple[Any, ...] | None:
    """Whole numbers that a node reads: constant, or of shapes; None where the input is left out."""
    if place >= len(node.inputs) or not node.inputs[place]:
        return None
    name = node.inputs[place]
    if name in plan.file.constants:
        return tuple(int(one) for one in plan.file.constants[name].reshape(-1))
    value = plan.value(node, place)
    if isinstance(value, Sizes):
        return value.numbers
    raise NotTranslated(f"{node}: its input {name!r} is computed of values, expected constants or sizes")


def are_sizes(plan: PlanWriter, node: Node) -> bool:
    """Whether a node computes with sizes."""
    known = [plan.values.get(name) for name in node.inputs]
    return any(isinstance(one, Sizes) for one in known) and all(
        isinstance(one, Sizes) or name in plan.file.constants for name, one in zip(node.inputs, known, strict=True)
    )


OPERATIONS = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "//", "Mod": "mod"}


def size_arithmetic(plan: PlanWriter, node: Node) -> Value:
    """An operator of OPERATIONS on sizes."""
    left, right = (sizes(plan, node, place) for place in (0, 1))
    assert left is not None
    assert right is not None
    if len(left) != 1 or len(right) != 1:
        raise NotTranslated(f"{node}: computes with several sizes at once")
    scalar = all(_is_scalar(plan, name) for name in node.inputs)
    return Sizes((Arithmetic(OPERATIONS[node.op], left[0], right[0]),), scalar)


def _is_scalar(plan: PlanWriter, name: str) -> bool:
    value = plan.values.get(name)
    return value.scalar if isinstance(value, Sizes) else not plan.file.constants[name].dim()


@translates("Reshape")
def _reshape(plan: PlanWriter, node: Node) -> Value:
    target = sizes(plan, node, 1)
    assert target is not None
    if node.attributes.get("allowzero") and 0 in target:
        raise NotTranslated(f"{node}: has sizes of 0 that are meant as such")
    shape = tuple(
        Register(OWN, place) if one == 0 and isinstance(one, int) else one for place, one in enumerate(target)
    )
    return plan.move(plan.value(node, 0), node, "reshape", shape=shape)


@translates("Flatten")
def _flatten(plan: PlanWriter, node: Node) -> Value:
    if node.attributes.get("axis", 1) != 1:
        raise NotTranslated(f"{node}: flattens from dimension {node.attributes['axis']}, expected 1")
    return plan.move(plan.value(node, 0), node, "flatten", start=1, end=-1)


@translates("Transpose")
def _transpose(plan: PlanWriter, node: Node) -> Value:
    value, dims = plan.value(node, 0), node.attributes.get("perm")
    if dims is None:
        raise NotTranslated(f"{node}: turns all dimensions around, expected a perm")
    if isinstance(value, Weight):
        return replace(value, values=value.values.permute(*dims), axis=_axis_of(value, list(dims)))
    return plan.move(value, node, "permute", dims=tuple(dims))


def _axis_of(weight: Weight, dims: Sequence[int]) -> int:
    """The axis of the scales after a permutation."""
    return weight.axis if weight.scale.numel() == 1 else dims.index(weight.axis % weight.values.dim())


@translates("DepthToSpace")
def _depth_to_space(plan: PlanWriter, node: Node) -> Value:
    """Torch's pixel_shuffle: (N, C r r, H, W) to (N, C, H r, W r)."""
    factor = int(node.attributes["blocksize"])
    if node.attributes.get("mode", b"DCR") != b"CRD":
        raise NotTranslated(f"{node}: has its blocks before its channels, expected the mode CRD")
    shape = (Register(OWN, 0), -1, factor, factor, Register(OWN, 2), Register(OWN, 3))
    value = plan.move(plan.value(node, 0), node, "reshape", shape=shape)
    value = plan.move(value, node, "permute", dims=(0, 1, 4, 2, 5, 3))
    value = plan.move(value, node, "flatten", start=2, end=3)
    return plan.move(value, node, "flatten", start=3, end=4)


@translates("Squeeze", "Unsqueeze")
def _squeeze(plan: PlanWriter, node: Node) -> Value:
    axes = sizes(plan, node, 1) or tuple(node.attributes.get("axes", ()))
    value = plan.value(node, 0)
    if isinstance(value, Sizes):
        return replace(value, scalar=node.op == "Squeeze")
    if not axes or any(one < 0 for one in axes):
        raise NotTranslated(f"{node}: expected axes from the front")
    for axis in sorted(axes, reverse=node.op == "Squeeze"):
        if node.op == "Squeeze":
            plan.require_size(value, axis, 1)
        value = plan.move(value, node, node.op.lower(), dim=axis)
    return value


@translates("Slice")
def _slice(plan: PlanWriter, node: Node) -> Value:
    starts, ends, axes, steps = (sizes(plan, node, place) for place in (1, 2, 3, 4))
    value = plan.value(node, 0)
    if starts is None or ends is None:
        raise NotTranslated(f"{node}: expected starts and ends as inputs (opset 10)")
    axes, steps = axes or tuple(range(len(starts))), steps or (1,) * len(starts)
    if isinstance(value, ShapeOf):
        return _part_of_shape(value, node, starts, ends)
    if isinstance(value, Sizes):
        if not all(isinstance(one, int) for one in (*starts, *ends, *steps)):
            raise NotTranslated(f"{node}: takes sizes at places that are computed")
        return Sizes(value.numbers[starts[0] : ends[0] : steps[0]])
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not isinstance(step, int) or step < 1:
            raise NotTranslated(f"{node}: takes values backwards")
        last = None if isinstance(end, int) and end >= ENDLESS else end
        start, last = (max(one, -ENDLESS) if isinstance(one, int) else one for one in (start, last))
        value = plan.move(value, node, "slice", dim=axis, start=start, end=last, step=step)
    return value


def _part_of_shape(shape: ShapeOf, node: Node, starts: Sequence[Any], ends: Sequence[Any]) -> Value:
    start, end = starts[0], ends[0]
    if not (isinstance(start, int) and isinstance(end, int) and shape.start == 0 and shape.end is None):
        raise NotTranslated(f"{node}: takes a part of a shape at places that are computed")
    if start < 0 and (end < 0 or end >= ENDLESS):
        return Sizes(tuple(Register(shape.register, dim) for dim in range(start, min(end, 0))))
    if not 0 <= start < end < ENDLESS:
        raise NotTranslated(f"{node}: takes a part of a shape up to its end")
    return Sizes(tuple(Register(shape.register, shape.start + dim) for dim in range(start, end)))


@translates("Split")
def _split(plan: PlanWriter, node: Node) -> tuple[Value, ...]:
    axis, value = int(node.attributes.get("axis", 0)), plan.value(node, 0)
    parts = sizes(plan, node, 1) or tuple(node.attributes.get("split", ()))
    if not parts:
        count = len(node.outputs)
        if node.attributes.get("num_outputs", count) != count:
            raise NotTranslated(f"{node}: has {count} outputs, and its num_outputs says another number")
        return tuple(plan.move(value, node, "chunk", chunks=count, dim=axis, index=place) for place in range(count))
    if not all(isinstance(one, int) for one in parts):
        raise NotTranslated(f"{node}: splits at sizes that are computed")
    ends = [sum(parts[: place + 1]) for place in range(len(parts))]
    plan.require_size(value, axis, ends[-1])
    return tuple(
        plan.move(value, node, "slice", dim=axis, start=end - part, end=end, step=1)
        for end, part in zip(ends, parts, strict=True)
    )


@translates("Cast")
def _cast(plan: PlanWriter, node: Node) -> Value:
    """Integers as the index of a table, and sizes."""
    value, to = plan.value(node, 0), int(node.attributes["to"])
    if isinstance(value, Integers) and not value.signed and to in (INT32, INT64):
        return Index(value)
    if isinstance(value, Sizes) and to in (INT32, INT64):
        return value
    if isinstance(value, (Real, Dequantized, Waiting)) and to == FLOAT:
        return value
    raise NotTranslated(f"{node}: is no conversion of integers to an index")


FLOAT, INT32, INT64 = 1, 6, 7
"""Of onnx.TensorProto.DataType."""


@translates("Gather")
def _gather(plan: PlanWriter, node: Node) -> Value:
    axis = int(node.attributes.get("axis", 0))
    if node.inputs[0] in plan.file.constants:
        return _table(plan, node)
    value = plan.value(node, 0)
    if isinstance(value, Weight):
        return _rows(plan, node, value)
    places = sizes(plan, node, 1)
    if isinstance(value, Sizes) and places is not None and all(isinstance(one, int) for one in places):
        scalar = not plan.file.constants[node.inputs[1]].dim()
        return Sizes(tuple(value.numbers[one] for one in places), scalar)
    if places is None or len(places) != 1 or not isinstance(places[0], int):
        raise NotTranslated(f"{node}: takes several values at once, expected one")
    scalar = not plan.file.constants[node.inputs[1]].dim()
    if isinstance(value, ShapeOf):
        if places[0] < 0 and (value.start or value.end is not None):
            raise NotTranslated(f"{node}: takes a size that is counted from behind")
        return Sizes((Register(value.register, value.start + places[0]),), scalar)
    one = plan.move(value, node, "select", dim=axis, index=places[0])
    return one if scalar else plan.move(one, node, "unsqueeze", dim=axis)


def _rows(plan: PlanWriter, node: Node, table: Weight) -> Value:
    """Rows of an embedding, whose table stays int8."""
    index = plan.value(node, 1)
    if not isinstance(index, Held) or node.attributes.get("axis", 0) or table.scale.numel() > 1:
        raise NotTranslated(f"{node}: takes values of a quantised constant otherwise than rows by numbers of rows")
    rank = plan.ranks[index.register]
    rank = None if rank is None else rank + table.values.dim() - 1
    return Real(plan.step(str(node), functools.partial(_dequantized_rows, table), (index.register,), rank))


def _dequantized_rows(table: Weight, index: Tensor) -> Tensor:
    places = torch.where(index < 0, index + len(table.values), index).to(torch.int64)
    rows = table.values.index_select(0, places.reshape(-1)).reshape(*index.shape, *table.values.shape[1:])
    return replace(table, values=rows).reals()


def _table(plan: PlanWriter, node: Node) -> Value:
    """uint8 (256,), or (channels * 256,) with an index to which each channel's first place was added."""
    table, index = plan.file.constants[node.inputs[0]], plan.value(node, 1)
    if not isinstance(index, Index) or table.dtype != torch.uint8 or table.dim() != 1:
        raise NotTranslated(f"{node}: takes values of a constant that is no table of uint8 by uint8")
    settings: dict[str, Any] = {"q": Register(index.integers.register)}
    if index.starts is None:
        settings["table"] = plan.constant(table)
    else:
        settings.update(table=plan.constant(table.reshape(-1, 256)), axis=_axis(index.starts, node))
    return Integers(plan.emit("lookup", **settings), UNKNOWN)


def index_of_channels(plan: PlanWriter, node: Node) -> Value | None:
    """The index of a table for each channel: an index to which 256 times the channel is added; else None."""
    values = [plan.values.get(name) for name in node.inputs]
    constants = [plan.file.constants[name] for name in node.inputs if name in plan.file.constants]
    index = next((one for one in values if isinstance(one, Index)), None)
    if index is None or index.starts is not None or len(constants) != 1 or node.op != "Add":
        return None
    return Index(index.integers, constants[0])


def _axis(starts: Tensor, node: Node) -> int:
    """The dimension whose places have tables of their own."""
    long = [axis for axis, size in enumerate(starts.shape) if size > 1]
    axis = long[0] if long else 0
    if len(long) > 1 or not torch.equal(starts.reshape(-1).long(), torch.arange(starts.numel()) * 256):
        raise NotTranslated(f"{node}: takes values of a table by an index that is no integer of one channel each")
    return axis


@translates("Pad")
def _pad(plan: PlanWriter, node: Node) -> Value:
    widths, value = sizes(plan, node, 1), plan.value(node, 0)
    if len(node.inputs) > 3 and node.inputs[3]:
        raise NotTranslated(f"{node}: names the axes that it pads")
    fill = plan.array(node, 2)
    own = value if isinstance(value, ChannelIntegers) else plan.integer_form(value, node)
    if widths is None or own.range == UNKNOWN or not all(isinstance(one, int) for one in widths):
        raise NotTranslated(f"{node}: expected widths that are constant")
    rank = len(widths) // 2
    pairs = [(widths[axis], widths[rank + axis]) for axis in reversed(range(rank))]
    while pairs and pairs[-1] == (0, 0):
        pairs.pop()
    if not pairs:
        return value
    mode = node.attributes.get("mode", b"constant").decode()
    place = _integer_of(0.0 if fill is None else float(fill), own.range, node)
    if isinstance(value, Integers):
        place = (0 if fill is None else int(fill)) + 128 * value.signed
    padded = plan.emit(
        "pad", q=Register(own.register), widths=tuple(one for pair in pairs for one in pair),
        mode={"edge": "replicate"}.get(mode, mode), fill=place,
    )  # fmt: skip
    done = replace(own, register=padded)
    return Dequantized(done) if isinstance(value, Dequantized) and isinstance(done, Integers) else done


def _integer_of(fill: float, range_: Range | ChannelRange, node: Node) -> int:
    """The integer that stands for a number, which has to be one of the range's."""
    if not fill:
        return range_.zero_point
    steps = fill / range_.scale if isinstance(range_, Range) else math.nan
    place = round(steps) + range_.zero_point if math.isfinite(steps) else -1
    if not 0 <= place <= 255 or abs(steps - round(steps)) > 1e-3:
        raise NotTranslated(f"{node}: fills with {fill}, which is none of its input's 256 values")
    return place


@translates("Expand")
def _expand(plan: PlanWriter, node: Node) -> Value:
    """A size of 1 keeps that of the input, and so does one that is left out in front."""
    value, target = plan.value(node, 0), sizes(plan, node, 1)
    assert target is not None
    held = value.integers if isinstance(value, Dequantized) else value
    rank = plan.ranks[held.register] if isinstance(held, (Real, Integers)) else None
    target = (1,) * ((rank or 0) - len(target)) + target
    further = 0 if rank is None else len(target) - rank
    keeps = [one == 1 and isinstance(one, int) and place >= further for place, one in enumerate(target)]
    shape = tuple(-1 if kept else one for kept, one in zip(keeps, target, strict=True))
    return plan.move(value, node, "expand", shape=shape)


@translates("Identity", "Dropout")
def _identity(plan: PlanWriter, node: Node) -> Value:
    if any(node.inputs[2:]):
        raise NotTranslated(f"{node}: may drop values, in training mode")
    return plan.value(node, 0)
