"""Views that take a part of a tensor, or cut it into several."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch

from quant.kernels.reference_plan import Register
from quant.ops.call import Call
from quant.ops.planning import BEFORE, Lines, PartsOf, PlanCall, Symbol, Unplanned, fixed, integer
from quant.ops.registry import Recognised, recognises
from quant.ops.views import View, view_of
from quant.runtime.trees import Ref


@dataclass(frozen=True)
class Narrow(View):
    """`length` values of a dimension, from `start`."""

    dim: Any = 0
    start: Any = 0
    length: Any = 0

    def plan(self, call: PlanCall) -> Lines:
        start, length = integer("start", self.start), integer("length", self.length)
        if start < 0:
            raise Unplanned("narrow from the end has no plan")
        place = {"dim": integer("dim", self.dim), "start": start, "end": start + length, "step": 1}
        return [("slice", {"x": call.tensor(), **place})]


@dataclass(frozen=True)
class Split(View):
    """A tuple of parts."""


@dataclass(frozen=True)
class Chunk(Split):
    """A tuple of `count` parts of one size, the last one smaller where the size does not divide the dimension."""

    planned_in_reals: ClassVar[bool] = True
    chunks: Any = 1
    dim: Any = 0

    def plan(self, call: PlanCall) -> PartsOf:
        return Chunks(call.tensor().index, integer("dim", self.dim), integer("chunks", self.chunks))


@dataclass(frozen=True)
class SplitSizes(Split):
    """A tuple of parts of given sizes, or of one size with a smaller last one."""

    planned_in_reals: ClassVar[bool] = True
    sizes: Any = 1
    dim: Any = 0

    def plan(self, call: PlanCall) -> PartsOf:
        x, sizes = call.tensor(), fixed("sizes", self.sizes)
        rank, dim, size = _along(call, x, self.dim)
        if isinstance(sizes, int):
            ends = range(sizes, size + sizes, sizes) if sizes > 0 else ()
        elif isinstance(sizes, (tuple, list)) and all(isinstance(one, int) and one > 0 for one in sizes):
            ends = tuple(accumulate(sizes))
        else:
            ends = ()
        if not ends:
            raise Unplanned("these sizes of parts have no plan")
        return Spans(x.index, dim, len(ends), rank, (0, *ends), sizes_given=not isinstance(sizes, int))


@dataclass(frozen=True)
class Unbind(Split):
    """A tuple of parts of one index each, without that dimension."""

    planned_in_reals: ClassVar[bool] = True
    dim: Any = 0

    def plan(self, call: PlanCall) -> PartsOf:
        x = call.tensor()
        rank, dim, size = _along(call, x, self.dim)
        if size == 0:
            raise Unplanned("no parts have no plan")
        return Rows(x.index, dim, size, rank)


def _along(call: PlanCall, x: Register, dim: Any) -> tuple[int, int, int]:
    """The number of dimensions, one of them counted from the front, and its size as captured."""
    shape = call.values.shape(x)
    dim = integer("dim", dim) % len(shape)
    return len(shape), dim, shape[dim]


@dataclass(frozen=True)
class Chunks(PartsOf):
    """What `chunk` gives; there may be fewer."""

    def part(self, index: int) -> Lines:
        place = {"chunks": self.count, "dim": self.dim, "index": index}
        return [("chunk", {"x": Register(self.source), **place})]

    def check(self) -> Lines:
        return self.part(self.count - 1)


@dataclass(frozen=True)
class Rows(PartsOf):
    """What `unbind` gives."""

    rank: int

    def part(self, index: int) -> Lines:
        return [("select", {"x": Register(self.source), "dim": self.dim, "index": _from_front(index, self.count)})]

    def check(self) -> Lines:
        return _ends_between(self, self.count - 1, self.count)


@dataclass(frozen=True)
class Spans(PartsOf):
    """What `split` gives. A recording holds the number of parts by a guard, whose check sees another sum as well.

    Attributes:
        bounds: of the parts, one more than there are.
        sizes_given: whether each size was given, so that torch refuses a tensor of another sum.
    """

    rank: int
    bounds: tuple[int, ...]
    sizes_given: bool

    def part(self, index: int) -> Lines:
        index = _from_front(index, self.count)
        place = {"dim": self.dim, "start": self.bounds[index], "end": self.bounds[index + 1], "step": 1}
        return [("slice", {"x": Register(self.source), **place})]

    def check(self) -> Lines:
        least = self.bounds[-1] - 1 if self.sizes_given else self.bounds[-2]
        return _ends_between(self, least, self.bounds[-1])


def _from_front(index: int, count: int) -> int:
    if not -count <= index < count:
        raise Unplanned("there is no such part")
    return index % count


def _ends_between(parts: Rows | Spans, least: int, most: int) -> Lines:
    """Lines that require a size above `least` and at most `most`; a plan is built for no other size.

    Index `least` must exist, and the part from `most` on must be empty, which a shape with a zero checks.
    """
    x = Register(parts.source)
    shape = [Register(parts.source, dim) if dim != parts.dim else 0 for dim in range(parts.rank)]
    beyond = {"dim": parts.dim, "start": most, "end": None, "step": 1}
    return [
        ("select", {"x": x, "dim": parts.dim, "index": least}),
        ("slice", {"x": x, **beyond}),
        ("reshape", {"x": BEFORE, "shape": tuple(shape)}),
    ]


@dataclass(frozen=True)
class Item(View):
    """x[index], x a tensor or a tuple of parts."""

    planned_in_reals: ClassVar[bool] = True
    index: Any = 0

    def plan(self, call: PlanCall) -> Lines:
        known = call.symbol()
        if known is not None:
            return _part(known, fixed("index", self.index))
        index = self.index if isinstance(self.index, tuple) else (self.index,)
        x, dim = call.tensor(), 0
        skipped = len(call.values.shape(x)) - sum(isinstance(one, (int, slice, Ref)) for one in index)
        if any(isinstance(one, Ref) for one in index) and sum(isinstance(one, (int, Ref)) for one in index) > 1:
            raise Unplanned("several indices of one tensor have no plan")
        lines: Lines = []
        for place, one in enumerate(index):
            source = BEFORE if lines else x
            if one is Ellipsis:
                dim += skipped
            elif isinstance(one, Ref):
                places = _indices(call, place)
                lines.append(("index_select", {"x": source, "dim": dim, "index": places, "negative": True}))
                dim += len(call.values.shape(places))
            elif one is None:
                lines.append(("unsqueeze", {"x": source, "dim": dim}))
                dim += 1
            elif isinstance(one, int) and not isinstance(one, bool):
                lines.append(("select", {"x": source, "dim": dim, "index": one}))
            elif isinstance(one, slice) and (one.step is None or (isinstance(one.step, int) and one.step > 0)):
                if one != slice(None):
                    start, end = (place if place is None else call.size(place) for place in (one.start, one.stop))
                    settings = {"dim": dim, "start": start, "end": end, "step": one.step or 1}
                    lines.append(("slice", {"x": source, **settings}))
                dim += 1
            else:
                raise Unplanned("this index has no plan")
        return lines or [("same", {"x": x})]


def _indices(call: PlanCall, place: int) -> Register:
    """The tensor of int64 at a place of what x is indexed by."""
    index = call.argument(1, "index")
    given = index[place] if isinstance(index, tuple) else index
    if not isinstance(given, Ref):
        raise Unplanned("this index has no plan")
    return call.values.indices(given)


def _part(known: Symbol, index: Any) -> Lines:
    """One part of a tuple."""
    if not isinstance(known, PartsOf) or not isinstance(index, int):
        raise Unplanned("this use of a tuple has no plan")
    return known.part(index)


@recognises(torch.narrow, "narrow")
def narrow(call: Call) -> Recognised:
    """A slice by its start and length."""
    return view_of(Narrow(call.get(1, "dim"), call.get(2, "start"), call.get(3, "length")), call)


@recognises(torch.chunk, "chunk")
def chunk(call: Call) -> Recognised:
    """A number of parts."""
    return view_of(Chunk(call.get(1, "chunks"), call.get(2, "dim", 0)), call)


@recognises(torch.split)
def split(call: Call) -> Recognised:
    """Parts of given sizes."""
    return view_of(SplitSizes(call.get(1, "split_size_or_sections"), call.get(2, "dim", 0)), call)


@recognises("split")
def split_method(call: Call) -> Recognised:
    """The same, with another name for the sizes."""
    return view_of(SplitSizes(call.get(1, "split_size"), call.get(2, "dim", 0)), call)


@recognises(torch.unbind, "unbind")
def unbind(call: Call) -> Recognised:
    """Parts of one index."""
    return view_of(Unbind(call.get(1, "dim", 0)), call)


@recognises(torch.tensor_split, "tensor_split")
def tensor_split(call: Call) -> Recognised:
    """Parts by numpy's rules, without operations in plans."""
    return view_of(Split(), call)


@recognises(operator.getitem)
def item(call: Call) -> Recognised:
    """A part by its index."""
    return view_of(Item(call.get(1, "index")), call)
