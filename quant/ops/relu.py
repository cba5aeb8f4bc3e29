"""ReLU and clamps between reals, as behind a dynamic linear layer; an int8 layer clamps by itself (`fusion/`)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from quant.ops.planning import Lines, PlanCall, Unplanned
from quant.ops.registry import plans_reals
from quant.runtime.module_calls import ReluCall


@plans_reals(F.relu, torch.relu, "relu")
def relu_function(call: PlanCall) -> Lines:
    """A function that leaves its input as it is."""
    if call.setting(1, "inplace", False):
        raise Unplanned("it writes to its input")
    return [("clamp", {"x": call.tensor(), "low": 0.0, "high": math.inf})]


@plans_reals(torch.clamp, torch.clip, "clamp", "clip")
def clamp(call: PlanCall) -> Lines:
    """Between two numbers, or below or above one."""
    if len(call.args) + len(call.kwargs) > 3 or not set(call.kwargs) <= {"input", "min", "max"}:
        raise Unplanned("it is computed in float")
    low, high = call.setting(1, "min", -math.inf), call.setting(2, "max", math.inf)
    if not all(isinstance(one, (int, float)) and one == one for one in (low, high)):
        raise Unplanned("its limits are no numbers")
    return [("clamp", {"x": call.tensor(), "low": float(low), "high": float(high)})]


@plans_reals(nn.ReLU)
def relu(call: PlanCall) -> ReluCall:
    """`nn.ReLU` that leaves its input as it is."""
    planned = ReluCall(call.out, (call.tensor().index,), call.node.target)
    if call.module is None or not planned.holds(call.module):
        raise Unplanned("it writes to its input, or is hooked")
    return planned
