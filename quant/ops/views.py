"""Views: calls that give the same values in another shape or order, or a part of them, and compute nothing.

On integers each is the captured call itself. This file has the base class and the views of all values; parts of them
are in `slices.py`, copies and calls without effect in `idle.py`. To add one takes a class with its `plan`, and a
function that recognises it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from quant.graph import Kind, Node
from quant.kernels.reference_plan import Register
from quant.ops.call import Call, StaysFloat, check_tensor, is_call_of
from quant.ops.lowering import Context, SameCall
from quant.ops.operator import Operator
from quant.ops.planning import BEFORE, Lines, PlanCall, Unplanned, fixed, integer
from quant.ops.registry import Recognised, plans_reals, recognises
from quant.ops.step import Step
from quant.runtime.trees import Attr, Ref

SPLITS = frozenset({
    torch.chunk, torch.split, torch.unbind, torch.tensor_split, torch.split_with_sizes, "chunk", "split", "unbind",
    "tensor_split", "split_with_sizes",
})  # fmt: skip
"""Calls that give a tuple of parts of one tensor (`slices.py`)."""


@dataclass(frozen=True)
class View(Operator):
    """The same values elsewhere: in another shape or order, copied, or a part of them.

    Attributes:
        idle: in eval mode it gives its input itself.
        planned_in_reals: the native plan computes it on float values too, between integers (`plan` serves both).
        keeps_order: it gives all values in their order, and changes the sizes at most.
        rank_by_size: how many dimensions it gives depends on a size.
    """

    name: ClassVar[str] = "pass"
    shares_range: ClassVar[bool] = True
    idle: ClassVar[bool] = False
    planned_in_reals: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = False
    rank_by_size: ClassVar[bool] = False

    def lower(self, step: Step, context: Context) -> SameCall:
        return SameCall()

    def on_integers(self, node: Node, kwargs: dict[str, Any]) -> tuple[Node, dict[str, Any]]:
        """The call on integers, which may lie in another memory format than the float values did."""
        return node, kwargs


def view_of(operator: Operator, call: Call) -> Recognised:
    """`operator`, for a call on an activation or on the parts that another call cut it into."""
    value = call.get(0, "input")
    if not isinstance(value, Ref):
        raise StaysFloat("its input is no activation")
    source = call.graph.nodes[value.index]
    if source.meta is not None:
        check_tensor(source.meta, call.dtype)
    if source.meta is None and not is_call_of(source, SPLITS):
        raise StaysFloat("its input is no tensor")
    return Recognised(operator, (value.index,))


def listed(call: Call, name: str) -> tuple[Any, ...]:
    """Settings after the input, given one by one, as one list, or by name."""
    settings = call.node.args[1:] or (call.node.kwargs.get(name, ()),)
    return tuple(settings[0]) if len(settings) == 1 and isinstance(settings[0], (tuple, list)) else tuple(settings)


COPYING = {"view": "reshape", "view_as": "reshape_as"}
"""Method that fails where no view exists -> the one that copies instead."""


@dataclass(frozen=True)
class ShapeView(View):
    """All values in another shape or order."""

    planned_in_reals: ClassVar[bool] = True


@dataclass(frozen=True)
class Reshape(ShapeView):
    """Another shape; its numbers may be Refs to values derived from sizes."""

    keeps_order: ClassVar[bool] = True
    shape: tuple[Any, ...] = ()

    def plan(self, call: PlanCall) -> Lines:
        if not self.shape:
            raise Unplanned(f"{call.name} to no dimensions has no plan")
        return [("reshape", {"x": call.tensor(), "shape": tuple(map(call.size, self.shape))})]

    def on_integers(self, node: Node, kwargs: dict[str, Any]) -> tuple[Node, dict[str, Any]]:
        return _copying(node, kwargs)


@dataclass(frozen=True)
class ReshapeAs(ShapeView):
    """The shape of another tensor."""

    keeps_order: ClassVar[bool] = True

    def plan(self, call: PlanCall) -> Lines:
        other = call.tensor(1, "other")
        shape = tuple(Register(other.index, dim) for dim in range(len(call.values.shape(other))))
        if not shape:
            raise Unplanned(f"{call.name} to no dimensions has no plan")
        return [("reshape", {"x": call.tensor(), "shape": shape})]

    def on_integers(self, node: Node, kwargs: dict[str, Any]) -> tuple[Node, dict[str, Any]]:
        return _copying(node, kwargs)


def _copying(node: Node, kwargs: dict[str, Any]) -> tuple[Node, dict[str, Any]]:
    """The copying form of a call that fails where no view exists; their shapes have other keyword names."""
    if node.kind is not Kind.METHOD or node.target not in COPYING:
        return node, kwargs
    renamed = {"shape" if name == "size" else name: value for name, value in kwargs.items()}
    return replace(node, target=COPYING[node.target]), renamed


@dataclass(frozen=True)
class Expand(ShapeView):
    """Repeated to a larger shape; its numbers may be Refs to values derived from sizes."""

    shape: tuple[Any, ...] = ()

    def plan(self, call: PlanCall) -> Lines:
        if not self.shape:
            raise Unplanned(f"{call.name} to no dimensions has no plan")
        return [("expand", {"x": call.tensor(), "shape": tuple(map(call.size, self.shape))})]


@dataclass(frozen=True)
class Flatten(ShapeView):
    """Dimensions `start` to `end`, both included, as one."""

    keeps_order: ClassVar[bool] = True
    start: Any = 0
    end: Any = -1

    def plan(self, call: PlanCall) -> Lines:
        ends = {"start": integer("start_dim", self.start), "end": integer("end_dim", self.end)}
        return [("flatten", {"x": call.tensor(), **ends})]


@dataclass(frozen=True)
class Unflatten(ShapeView):
    """One dimension as several."""

    keeps_order: ClassVar[bool] = True
    dim: Any = 0
    sizes: Any = ()

    def plan(self, call: PlanCall) -> Lines:
        """A reshape with the other sizes as they are."""
        dim, sizes = self.dim, fixed("sizes", self.sizes)
        x = call.tensor()
        rank = len(call.values.shape(x))
        if not isinstance(dim, int) or not all(isinstance(size, int) for size in sizes):
            raise Unplanned("its sizes are computed at run time")
        before, after = range(dim % rank), range(dim % rank + 1, rank)
        kept = [[Register(x.index, place) for place in part] for part in (before, after)]
        return [("reshape", {"x": x, "shape": (*kept[0], *sizes, *kept[1])})]


@dataclass(frozen=True)
class Permute(ShapeView):
    """The dimensions in another order."""

    dims: tuple[Any, ...] = ()

    def plan(self, call: PlanCall) -> Lines:
        return [("permute", {"x": call.tensor(), "dims": tuple(integer("dims", dim) for dim in self.dims)})]


@dataclass(frozen=True)
class Transpose(ShapeView):
    """Two dimensions exchanged."""

    dim0: Any = 0
    dim1: Any = 1

    def plan(self, call: PlanCall) -> Lines:
        dims = {"dim0": integer("dim0", self.dim0), "dim1": integer("dim1", self.dim1)}
        return [("transpose", {"x": call.tensor(), **dims})]


@dataclass(frozen=True)
class Unsqueeze(ShapeView):
    """A new dimension of size one."""

    keeps_order: ClassVar[bool] = True
    dim: Any = 0

    def plan(self, call: PlanCall) -> Lines:
        return [("unsqueeze", {"x": call.tensor(), "dim": integer("dim", self.dim)})]


@dataclass(frozen=True)
class Squeeze(ShapeView):
    """Without a dimension of size one, or, with None, without all of them."""

    keeps_order: ClassVar[bool] = True
    rank_by_size: ClassVar[bool] = True
    dim: Any = None

    def plan(self, call: PlanCall) -> Lines:
        if not isinstance(self.dim, int):
            raise Unplanned("squeeze without one dimension has no plan")
        return [("squeeze", {"x": call.tensor(), "dim": self.dim})]


@recognises(torch.reshape, "reshape")
def reshape(call: Call) -> Recognised:
    """A reshape."""
    return view_of(Reshape(listed(call, "shape")), call)


@recognises("view")
def view(call: Call) -> Recognised:
    """A view, which on integers is a reshape."""
    return view_of(Reshape(listed(call, "size")), call)


@recognises("view_as", "reshape_as")
def reshape_as(call: Call) -> Recognised:
    """A reshape to another tensor's shape."""
    return view_of(ReshapeAs(), call)


@recognises("expand")
def expand(call: Call) -> Recognised:
    """Repeated to a larger shape."""
    return view_of(Expand(listed(call, "size")), call)


@plans_reals("expand", moves=True)
def expand_in_reals(call: PlanCall) -> Lines:
    """Of a float value, a parameter or a buffer."""
    rest = call.args[1:] or (call.kwargs.get("size", ()),)
    sizes = [call.number(size) for size in (rest[0] if isinstance(rest[0], (tuple, list)) else rest)]
    if not sizes or None in sizes:
        raise Unplanned("its shape is computed at run time")
    x = call.real(0, "input")
    lines: Lines = [("constant", {"value": x})] if isinstance(x, Attr) else []
    return [*lines, ("expand", {"x": BEFORE if lines else x, "shape": tuple(sizes)})]


@plans_reals("expand_as", moves=True)
def expand_as(call: PlanCall) -> Lines:
    """To the shape of another tensor."""
    other = call.sized(1, "other")
    sizes = tuple(Register(other.index, dim) for dim in range(len(call.values.shape(other))))
    if not sizes:
        raise Unplanned("to no dimensions has no plan")
    return [("expand", {"x": call.tensor(), "shape": sizes})]


@plans_reals(torch.repeat_interleave, "repeat_interleave", moves=True)
def repeat_interleave(call: PlanCall) -> Lines:
    """Each part along a dimension so many times, as keys of attention are that several heads of queries share."""
    x, repeats, dim = call.tensor(), call.setting(1, "repeats"), call.setting(2, "dim")
    shape = call.values.shape(x)
    if type(repeats) is not int or repeats < 1 or not isinstance(dim, int):
        raise Unplanned("its repetitions are no number along a dimension")
    if call.setting(3, "output_size") is not None:
        raise Unplanned("its output_size is checked by torch")
    dim %= len(shape)
    sizes = [Register(x.index, place) for place in range(len(shape))]
    return [
        ("unsqueeze", {"x": x, "dim": dim + 1}),
        ("expand", {"x": BEFORE, "shape": (*sizes[: dim + 1], repeats, *sizes[dim + 1 :])}),
        ("flatten", {"x": BEFORE, "start": dim, "end": dim + 1}),
    ]


@recognises(nn.Flatten, torch.flatten, "flatten")
def flatten(call: Call) -> Recognised:
    """Neighbouring dimensions as one."""
    layer: Any = call.module
    if layer is not None:
        return view_of(Flatten(layer.start_dim, layer.end_dim), call)
    return view_of(Flatten(call.get(1, "start_dim", 0), call.get(2, "end_dim", -1)), call)


@recognises(nn.Unflatten, "unflatten")
def unflatten(call: Call) -> Recognised:
    """One dimension as several."""
    layer: Any = call.module
    if layer is not None:
        return view_of(Unflatten(layer.dim, layer.unflattened_size), call)
    return view_of(Unflatten(call.get(1, "dim"), call.get(2, "sizes")), call)


@plans_reals(torch.unflatten, moves=True)
def unflatten_function(call: PlanCall) -> Lines:
    """`torch.unflatten`, which is planned in float only."""
    return Unflatten(call.setting(1, "dim"), call.setting(2, "sizes")).plan(call)


@recognises(torch.permute, "permute")
def permute(call: Call) -> Recognised:
    """The dimensions in another order."""
    return view_of(Permute(listed(call, "dims")), call)


@recognises(torch.transpose, "transpose")
def transpose(call: Call) -> Recognised:
    """Two dimensions exchanged."""
    return view_of(Transpose(call.get(1, "dim0"), call.get(2, "dim1")), call)


@recognises(torch.swapaxes, "swapaxes")
def swapaxes(call: Call) -> Recognised:
    """The same by numpy's name."""
    return view_of(Transpose(call.get(1, "axis0"), call.get(2, "axis1")), call)


@recognises(torch.unsqueeze, "unsqueeze")
def unsqueeze(call: Call) -> Recognised:
    """A new dimension of size one."""
    return view_of(Unsqueeze(call.get(1, "dim")), call)


@recognises(torch.squeeze, "squeeze")
def squeeze(call: Call) -> Recognised:
    """Without a dimension of size one."""
    return view_of(Squeeze(call.get(1, "dim")), call)


@recognises(torch.movedim, torch.flip, torch.repeat_interleave, "movedim", "flip", "repeat", "t")
def unplanned(call: Call) -> Recognised:
    """Views without an operation in native plans."""
    return view_of(View(), call)
