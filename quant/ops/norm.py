"""Layer norms and group norms, which stay float32; their kernels sum in another order than torch, so that the last bits
differ."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quant.kernels.reference_plan import Constant, Line
from quant.ops.planning import Lines, PlanCall, Unplanned, integer
from quant.ops.registry import plans_reals
from quant.runtime.module_calls import GroupNormCall, NormCall, NormFunctionCall
from quant.runtime.names import attribute
from quant.runtime.trees import Attr


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


@plans_reals(F.layer_norm, exact=False)
def layer_norm_function(call: PlanCall) -> Lines | NormFunctionCall:
    """Over the last dimension."""
    shape = call.setting(1, "normalized_shape")
    if len(shape) != 1:
        raise Unplanned("it is over several dimensions")
    integer("normalized_shape", shape[0])
    return _with_parameters(call, "layer_norm", {"eps": call.setting(4, "eps", 1e-5)})


@plans_reals(F.group_norm, exact=False)
def group_norm_function(call: PlanCall) -> Lines | NormFunctionCall:
    """As `nn.GroupNorm` calls it."""
    groups = integer("num_groups", call.setting(1, "num_groups"))
    return _with_parameters(call, "group_norm", {"groups": groups, "eps": call.setting(4, "eps", 1e-5)})


def _with_parameters(call: PlanCall, op: str, settings: dict[str, Any]) -> Lines | NormFunctionCall:
    """The line of a function whose weight and bias are both a module's parameters of these names, or nothing."""
    x = call.tensor()
    arguments = {name: call.argument(place, name) for place, name in ((2, "weight"), (3, "bias"))}
    if all(value is None for value in arguments.values()):
        return [(op, {"x": x, **arguments, **settings})]
    paths = {name: value.path for name, value in arguments.items() if isinstance(value, Attr)}
    owner = paths.get("weight", "").rpartition(".")[0]
    if paths != {name: f"{owner}.{name}" if owner else name for name in arguments}:
        raise Unplanned("its weight and bias are not the parameters of one module")
    module = attribute(call.root, owner) if owner else call.root
    planned = NormFunctionCall(
        call.out,
        (x.index,),
        owner,
        str(Line(call.out, op, {"x": x, "weight": Constant(0), "bias": Constant(1), **settings})),
    )
    if not planned.holds(module) or any(getattr(module, name).dtype != torch.float32 for name in paths):
        raise Unplanned("it is computed in float")
    return planned
