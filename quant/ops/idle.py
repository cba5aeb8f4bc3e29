"""Views that give every value as it is: copies, and calls without effect in eval mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import nn

from quant.ops.call import Call, StaysFloat
from quant.ops.planning import Lines, PlanCall, Unplanned
from quant.ops.registry import Recognised, plans_reals, recognises
from quant.ops.views import View, view_of
from quant.runtime.module_calls import IDLE, DropoutCall, IdleCall


@dataclass(frozen=True)
class Copy(View):
    """A copy."""

    def plan(self, call: PlanCall) -> Lines:
        return [("same", {"x": call.tensor()})]


@dataclass(frozen=True)
class Idle(Copy):
    """The input itself, as from a dropout in eval mode."""

    idle: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = True


@dataclass(frozen=True)
class IdleFunction(Idle):
    """A function that gives its input in eval mode."""


@dataclass(frozen=True)
class Identity(Idle):
    """`nn.Identity`, and arithmetic with a number that changes nothing (`Lookup.gives_input`)."""


@dataclass(frozen=True)
class Contiguous(Idle):
    """`contiguous`, which no kernel needs."""

    planned_in_reals: ClassVar[bool] = True


@recognises(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, "detach")
def idle(call: Call) -> Recognised:
    """Layers that drop values in training mode, and `detach`."""
    return view_of(Idle(), call)


DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)


@recognises(*DROPOUTS)
def dropout(call: Call) -> Recognised:
    """Dropout functions, whose `training` argument decides; layers follow their mode."""
    if call.get(2, "training", True) is True:
        raise StaysFloat("it drops values in eval mode too")
    return view_of(IdleFunction(), call)


@recognises(nn.Identity)
def identity(call: Call) -> Recognised:
    """`nn.Identity`."""
    return view_of(Identity(), call)


@recognises("contiguous")
def contiguous(call: Call) -> Recognised:
    """`contiguous`."""
    return view_of(Contiguous(), call)


@recognises("clone")
def copy(call: Call) -> Recognised:
    """A copy."""
    return view_of(Copy(), call)


@plans_reals(*IDLE, moves=True)
def idle_in_reals(call: PlanCall) -> IdleCall:
    """Between float steps."""
    module = call.module
    planned = IdleCall(call.out, (call.tensor().index,), call.node.target)
    if module is None or len(call.args) != 1 or call.kwargs or not planned.holds(module):
        raise Unplanned("it is computed in float")
    return planned


@plans_reals(*DROPOUTS, moves=True)
def dropout_in_reals(call: PlanCall) -> DropoutCall:
    """Between float steps, while the module whose forward calls it is in eval mode."""
    if call.argument(2, "training") is not False or call.argument(3, "inplace"):
        raise Unplanned("it is computed in float")
    return DropoutCall(call.out, (call.tensor().index,), call.node.owner)
