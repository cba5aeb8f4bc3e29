"""Choices between float32 values by a mask of booleans, whose bytes a plan reads."""

from __future__ import annotations

from typing import Any

import torch

from quant.kernels.reference_plan import Register
from quant.ops.planning import Lines, PlanCall, Unplanned, before
from quant.ops.registry import plans_reals
from quant.runtime.trees import Attr, Ref


@plans_reals(torch.where)
def where(call: PlanCall) -> Lines:
    """`torch.where` of two values."""
    mask, a, b = _three(call, "condition", "input", "other")
    return _chosen(call, mask, a, b)


@plans_reals("where")
def where_method(call: PlanCall) -> Lines:
    """The method of the first value."""
    a, mask, b = _three(call, "self", "condition", "other")
    return _chosen(call, mask, a, b)


def _three(call: PlanCall, *names: str) -> list[Any]:
    """The arguments of a call that has these three."""
    if len(call.args) + len(call.kwargs) != len(names):
        raise Unplanned("it is computed in float")
    return [call.argument(place, name) for place, name in enumerate(names)]


@plans_reals(torch.masked_fill, "masked_fill")
def masked_fill(call: PlanCall) -> Lines:
    """A number in the places of the mask."""
    x, mask, value = _three(call, "input", "mask", "value")
    if isinstance(value, (Ref, Attr)):
        raise Unplanned("it is computed in float")
    lines = _chosen(call, mask, value, x)
    if len(call.values.shape(_mask(call, mask))) > len(call.values.shape(call.values.tensor(x))):
        raise Unplanned("its mask has more dimensions")
    return lines


def _chosen(call: PlanCall, mask: Any, a: Any, b: Any) -> Lines:
    """Lines for a where the mask is true, else b."""
    if not isinstance(a, Ref) and not isinstance(b, Ref):
        raise Unplanned("it is computed of constants alone")
    lines: Lines = []
    held = [_operand(call, one, lines) for one in (a, b)]
    # The constants' lines come first, in order; each is read from so many lines before.
    places = [one if isinstance(one, Register) else before(len(lines) - one) for one in held]
    return [*lines, ("where_f32", {"mask": _mask(call, mask), "a": places[0], "b": places[1]})]


def _operand(call: PlanCall, value: Any, lines: Lines) -> Register | int:
    """A tensor, or the place among `lines` of the constant that is added there."""
    if isinstance(value, Ref):
        return call.values.tensor(value)
    if isinstance(value, Attr):
        lines.append(("constant", {"value": call.values.constant(value)}))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        lines.append(("constant", {"value": torch.tensor(float(value))}))
    else:
        raise Unplanned("it is computed in float")
    return len(lines) - 1


def _mask(call: PlanCall, mask: Any) -> Register:
    """The register of a mask of booleans, which a region reads as bytes."""
    register = Register(mask.index) if isinstance(mask, Ref) else None
    if register is None or call.values.dtype(register) != torch.bool:
        raise Unplanned("its mask is no tensor of booleans")
    return register
