"""Layer norms, which stay float32; their kernel sums in another order than torch, so that the last bits differ."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from quant.ops.planning import Lines, PlanCall, Unplanned
from quant.ops.registry import plans_reals
from quant.runtime.module_calls import NormCall
from quant.runtime.trees import Attr


@plans_reals(F.layer_norm, exact=False)
def layer_norm_function(call: PlanCall) -> Lines:
    """`F.layer_norm` over the last dimension, with parameters of the model."""
    shape = call.setting(1, "normalized_shape")
    if len(shape) != 1:
        raise Unplanned("it normalises over several dimensions")
    constants = {name: call.argument(place, name) for place, name in ((2, "weight"), (3, "bias"))}
    if not all(value is None or isinstance(value, Attr) for value in constants.values()):
        raise Unplanned("its weight or bias is computed at run time")
    named = {name: value if value is None else call.values.constant(value) for name, value in constants.items()}
    return [("layer_norm", {"x": call.tensor(), **named, "eps": float(call.setting(4, "eps", 1e-5))})]


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
