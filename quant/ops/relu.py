"""ReLU between reals, as behind a dynamic linear layer. In an int8 layer it is a clamp of that (`fusion/`)."""

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


@plans_reals(nn.ReLU)
def relu(call: PlanCall) -> ReluCall:
    """`nn.ReLU` that leaves its input as it is."""
    planned = ReluCall(call.out, (call.tensor().index,), call.node.target)
    if call.module is None or not planned.holds(call.module):
        raise Unplanned("it writes to its input, or is hooked")
    return planned
