"""`torch.roll`, which plans compute by joining the two parts of each dimension the other way round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from quant.kernels.plan_sizes import Arithmetic
from quant.kernels.reference_plan import Register
from quant.ops.call import Call
from quant.ops.planning import BEFORE, Lines, PlanCall, Unplanned, before, integer
from quant.ops.registry import Recognised, recognises
from quant.ops.views import View, view_of


@dataclass(frozen=True)
class Roll(View):
    """Values moved along dimensions, those beyond the end to the beginning; shifts may be Refs to values of sizes."""

    planned_in_reals: ClassVar[bool] = True
    shifts: Any = 0
    dims: Any = None

    def plan(self, call: PlanCall) -> Lines:
        x = call.tensor()
        shifts, dims = (one if isinstance(one, (tuple, list)) else (one,) for one in (self.shifts, self.dims))
        if None in dims or not 1 <= len(dims) == len(shifts) <= MOST_DIMS:
            raise Unplanned(f"{call.name} over these dimensions has no plan")
        joins = "cat" if call.values.dtype(x) is torch.uint8 else "cat_f32"
        lines: Lines = []
        for shift, number in zip(shifts, dims, strict=True):
            dim = integer("dims", number)
            size = Register(x.index, dim)
            begin = Arithmetic("-", size, Arithmetic("mod", call.size(shift), Arithmetic("max", size, 1)))
            value, same = (BEFORE, before(2)) if lines else (x, x)
            lines += [
                ("slice", {"x": value, "dim": dim, "start": begin, "end": None, "step": 1}),
                ("slice", {"x": same, "dim": dim, "start": 0, "end": begin, "step": 1}),
                (joins, {"tensors": (before(2), BEFORE), "dim": dim}),
            ]
        return lines


MOST_DIMS = 2
"""Dimensions that one call rolls in a plan."""


@recognises(torch.roll, "roll")
def roll(call: Call) -> Recognised:
    """A roll over given dimensions."""
    return view_of(Roll(call.get(1, "shifts"), call.get(2, "dims")), call)
