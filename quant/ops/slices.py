"""Moves that take a part of a tensor, or cut it into several."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from quant.ops.call import Call
from quant.ops.moves import SPLITS, Move, moved
from quant.ops.planning import BEFORE, Lines, PartsOf, PlanCall, Symbol, Unplanned, fixed, integer, part_of
from quant.ops.registry import Recognised, recognises


@dataclass(frozen=True)
class Narrow(Move):
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
class Split(Move):
    """A tuple of parts."""


@dataclass(frozen=True)
class Chunk(Split):
    """A tuple of so many parts of one size, the last of them smaller where they do not divide the dimension."""

    planned_in_reals: ClassVar[bool] = True
    chunks: Any = 1
    dim: Any = 0

    def plan(self, call: PlanCall) -> PartsOf:
        return PartsOf(call.tensor().index, integer("chunks", self.chunks), integer("dim", self.dim))


@dataclass(frozen=True)
class Item(Move):
    """x[index], x a tensor or a tuple of parts."""

    planned_in_reals: ClassVar[bool] = True
    index: Any = 0

    def plan(self, call: PlanCall) -> Lines:
        index = fixed("index", self.index)
        known = call.symbol()
        if known is not None:
            return _part(known, index)
        x, dim = call.tensor(), 0
        lines: Lines = []
        for one in index if isinstance(index, tuple) else (index,):
            if isinstance(one, int) and not isinstance(one, bool):
                lines.append(("select", {"x": BEFORE if lines else x, "dim": dim, "index": one}))
            elif isinstance(one, slice) and (one.step is None or one.step > 0):
                if one != slice(None):
                    settings = {"dim": dim, "start": one.start, "end": one.stop, "step": one.step or 1}
                    lines.append(("slice", {"x": BEFORE if lines else x, **settings}))
                dim += 1
            else:
                raise Unplanned("this index has no plan")
        return lines or [("same", {"x": x})]


def _part(known: Symbol, index: Any) -> Lines:
    """One part of a tuple."""
    if type(known) is not PartsOf or not isinstance(index, int):
        raise Unplanned("this use of a tuple has no plan")
    return part_of(known, index)


@recognises(torch.narrow, "narrow")
def narrow(call: Call) -> Recognised:
    """A slice by its start and length."""
    return moved(Narrow(call.get(1, "dim"), call.get(2, "start"), call.get(3, "length")), call)


@recognises(torch.chunk, "chunk")
def chunk(call: Call) -> Recognised:
    """So many parts."""
    return moved(Chunk(call.get(1, "chunks"), call.get(2, "dim", 0)), call)


@recognises(*(one for one in SPLITS if one not in (torch.chunk, "chunk")))
def split(call: Call) -> Recognised:
    """Parts of given sizes."""
    return moved(Split(), call)


@recognises(operator.getitem)
def item(call: Call) -> Recognised:
    """A part by its index."""
    return moved(Item(call.get(1, "index")), call)
