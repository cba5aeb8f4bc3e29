"""Calls that ask for float32 or for the CPU, and so give a float32 tensor itself; and float32 tensors of numbers."""

from __future__ import annotations

from typing import Any

import torch

from quant.kernels.reference_plan import Register
from quant.ops.planning import Lines, PlanCall, Unplanned, fixed
from quant.ops.registry import plans_reals
from quant.runtime.trees import Attr, Ref

CPUS = ("cpu", torch.device("cpu"))
IDLE_OPTIONS: dict[str, tuple[Any, ...]] = {
    "device": (None, *CPUS),
    "dtype": (None, torch.float32),
    "non_blocking": (False, True),
    "copy": (False,),
    "memory_format": (None, torch.preserve_format),
}
"""Arguments of `to` by name -> the values with which a float32 tensor on the CPU stays itself."""


@plans_reals("to", moves=True)
def to_float32(call: PlanCall) -> Lines:
    """`to`, in any of its forms."""
    for name, value in call.kwargs.items():
        if value not in IDLE_OPTIONS.get(name, ()):
            raise Unplanned(f"its {name} has no plan")
    if not all(value is None or value is False or value in (torch.float32, *CPUS) for value in call.args[1:]):
        raise Unplanned("it gives another kind of tensor")
    return _itself(call)


@plans_reals("float", moves=True)
def as_float32(call: PlanCall) -> Lines:
    """`float()`, by which a caller's bytes or booleans become numbers."""
    given = call.argument(0, "input")
    if len(call.args) == 1 and not call.kwargs and isinstance(given, Ref) and call.values.holds_bytes(given):
        return [("dequantize", {"q": Register(given.index), "scale": 1.0, "zero_point": 0})]
    return on_cpu(call)


@plans_reals("cpu", moves=True)
def on_cpu(call: PlanCall) -> Lines:
    """`cpu()`."""
    if len(call.args) + len(call.kwargs) != 1:
        raise Unplanned("it is asked for another memory format")
    return _itself(call)


@plans_reals("type_as", moves=True)
def as_other(call: PlanCall) -> Lines:
    """`type_as`, where the other tensor is float32, too."""
    other = call.tensor(1, "other")
    if call.values.dtype(Register(other.index)) != torch.float32:
        raise Unplanned("it gives another kind of tensor")
    return _itself(call)


def _itself(call: PlanCall) -> Lines:
    """The tensor, which may be a parameter or buffer."""
    x = call.real(0, "input")
    return [("constant", {"value": x}) if isinstance(x, Attr) else ("same", {"x": x})]


@plans_reals(torch.tensor)
def numbers(call: PlanCall) -> Lines:
    """`torch.tensor` of numbers, as the empty ones that key and value caches begin with."""
    data = fixed("data", call.argument(0, "data"))
    if not set(call.kwargs) <= {"data", "dtype", "device"} or call.kwargs.get("device") not in IDLE_OPTIONS["device"]:
        raise Unplanned("it is computed in float")
    if call.kwargs.get("dtype") not in (None, torch.float32) or call.node.meta is None:
        raise Unplanned("it gives another kind of tensor")
    if call.node.meta.dtype != torch.float32:
        raise Unplanned("it gives another kind of tensor")
    return [("constant", {"value": torch.tensor(data, dtype=torch.float32)})]
