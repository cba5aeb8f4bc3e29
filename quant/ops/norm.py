"""Layer norms, which stay float32; their kernel sums in another order than torch, so that the last bits differ."""

from __future__ import annotations

import torch
from torch import nn

from quant.ops.planning import PlanCall, Unplanned
from quant.ops.registry import plans_reals
from quant.runtime.module_calls import NormCall


@plans_reals(nn.LayerNorm, exact=False)
def layer_norm(call: PlanCall) -> NormCall:
    """A layer norm whose parameters are float32."""
    module = call.module
    planned = NormCall(call.out, (call.tensor().index,), call.node.target)
    if module is None or len(call.args) != 1 or call.kwargs or not planned.holds(module):
        raise Unplanned("it is computed in float")
    if any(one is not None and one.dtype != torch.float32 for one in (module.weight, module.bias)):
        raise Unplanned("it is computed in float")
    return planned
