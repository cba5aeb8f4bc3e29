"""Layer norms and group norms, which stay float32; their kernels sum in another order than torch, so that the last bits
differ."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quant.kernels.reference_plan import Register
from quant.ops.planning import BEFORE, Lines, PlanCall, Unplanned, integer
from quant.ops.registry import plans_reals
from quant.runtime.module_calls import GroupNormCall, NormCall
from quant.runtime.trees import Attr


@plans_reals(F.layer_norm, exact=False)
def layer_norm_function(call: PlanCall) -> Lines:
    """`F.layer_norm` over the last dimension, with parameters of the model."""
    shape = call.setting(1, "normalized_shape")
    if len(shape) != 1:
        raise Unplanned("it normalises over several dimensions")
    settings = {**_affine(call), "eps": float(call.setting(4, "eps", 1e-5))}
    x = call.tensor()
    if settings["weight"] is not None:
        return [("layer_norm", {"x": x, **settings})]
    # No weight says how many values a row has to have.
    size = Register(x.index, len(call.values.shape(x)) - 1)
    return [("holds", {"x": x, "size": size, "equals": shape[0]}), ("layer_norm", {"x": BEFORE, **settings})]


@plans_reals(F.group_norm, exact=False)
def group_norm_function(call: PlanCall) -> Lines:
    """`F.group_norm` with parameters of the model."""
    groups = integer("num_groups", call.setting(1, "num_groups"))
    settings = {**_affine(call), "eps": float(call.setting(4, "eps", 1e-5))}
    return [("group_norm", {"x": call.tensor(), "groups": groups, **settings})]


def _affine(call: PlanCall) -> dict[str, Any]:
    """The weight and bias of a function."""
    constants = {name: call.argument(place, name) for place, name in ((2, "weight"), (3, "bias"))}
    if not all(value is None or isinstance(value, Attr) for value in constants.values()):
        raise Unplanned("its weight or bias is computed at run time")
    return {name: value if value is None else call.values.constant(value) for name, value in constants.items()}


@plans_reals(nn.LayerNorm, exact=False)
def layer_norm(call: PlanCall) -> NormCall:
    """A layer norm whose parameters are float32."""
    return _of_module(call, NormCall)


@plans_reals(nn.GroupNorm, exact=False)
def group_norm(call: PlanCall) -> NormCall:
    """A group norm whose parameters are float32."""
    return _of_module(call, GroupNormCall)


def _of_module(call: PlanCall, kind: type[NormCall]) -> NormCall:
    module = call.module
    planned = kind(call.out, (call.tensor().index,), call.node.target)
    if module is None or len(call.args) != 1 or call.kwargs or not planned.holds(module):
        raise Unplanned("it is computed in float")
    if any(one is not None and one.dtype != torch.float32 for one in (module.weight, module.bias)):
        raise Unplanned("it is computed in float")
    return planned
