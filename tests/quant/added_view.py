"""A view that nobody else knows, as one file of a family in quant/ops/ would add it; `test_operators.py` imports it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quant.ops.call import Call, StaysFloat
from quant.ops.planning import BEFORE, Lines, PlanCall
from quant.ops.registry import Recognised, recognises
from quant.ops.views import ShapeView, view_of


@dataclass(frozen=True)
class MoveAxis(ShapeView):
    """A dimension at another place among the others, both counted from the front."""

    source: int = 0
    destination: int = 0

    def plan(self, call: PlanCall) -> Lines:
        """One neighbour after the other changes places with it."""
        way = 1 if self.source < self.destination else -1
        swaps = [(dim, dim + way) for dim in range(self.source, self.destination, way)]
        if not swaps:
            return [("same", {"x": call.tensor()})]
        reads = [call.tensor(), *[BEFORE] * len(swaps)]
        return [("transpose", {"x": x, "dim0": a, "dim1": b}) for x, (a, b) in zip(reads, swaps, strict=False)]


@recognises(torch.moveaxis)
def moveaxis(call: Call) -> Recognised:
    """`torch.moveaxis` of one dimension."""
    ends = [call.get(1, "source"), call.get(2, "destination")]
    if not all(isinstance(end, int) for end in ends):
        raise StaysFloat("it moves several dimensions")
    source, destination = (end % call.rank(call.activation()) for end in ends)
    return view_of(MoveAxis(source, destination), call)
