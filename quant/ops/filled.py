"""Float32 tensors of one number, such as sums begin with, in the shape that a call asks for or that of a tensor."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from quant.kernels.reference_plan import Register
from quant.ops.planning import BEFORE, Lines, PlanCall, Unplanned
from quant.ops.real_types import IDLE_OPTIONS
from quant.ops.registry import plans_reals

OPTIONS: dict[str, tuple[Any, ...]] = {
    **{name: IDLE_OPTIONS[name] for name in ("device", "dtype", "memory_format")},
    "layout": (None, torch.strided),
    "names": (None,),
    "out": (None,),
    "pin_memory": (None, False),
    "requires_grad": (False,),
}
"""Keyword arguments, but what they fill -> the values with which they change nothing."""


def filled(call: PlanCall, number: float) -> Lines:
    """In a shape, whose sizes are given one by one or together."""
    return _in_shape(call, number, call.args)


def new_filled(call: PlanCall, number: float) -> Lines:
    """The same as a method of a tensor."""
    call.tensor()
    return _in_shape(call, number, call.args[1:])


def filled_like(call: PlanCall, number: float) -> Lines:
    """In the shape of a tensor."""
    if len(call.args) > 1:
        raise Unplanned("it is computed in float")
    x = call.sized(0, "input")
    return _of(call, number, tuple(Register(x.index, dim) for dim in range(len(call.values.shape(x)))))


def _in_shape(call: PlanCall, number: float, positional: tuple[Any, ...]) -> Lines:
    given = positional or (call.kwargs.get("size", ()),)
    sizes = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return _of(call, number, tuple(map(call.number, sizes)))


def _of(call: PlanCall, number: float, sizes: tuple[Any, ...]) -> Lines:
    for name, idle in OPTIONS.items():
        if call.kwargs.get(name, idle[0]) not in idle:
            raise Unplanned(f"its {name} has no plan")
    if call.node.meta is None or call.node.meta.dtype != torch.float32:
        raise Unplanned("it gives another kind of tensor")
    if None in sizes:
        raise Unplanned("its shape is computed at run time")
    lines: Lines = [("constant", {"value": torch.tensor(number)})]
    return [*lines, ("expand", {"x": BEFORE, "shape": sizes})] if sizes else lines


for _number, _function, _method, _like in (
    (0.0, torch.zeros, "new_zeros", torch.zeros_like),
    (1.0, torch.ones, "new_ones", torch.ones_like),
):
    plans_reals(_function)(partial(filled, number=_number))
    plans_reals(_method)(partial(new_filled, number=_number))
    plans_reals(_like)(partial(filled_like, number=_number))
