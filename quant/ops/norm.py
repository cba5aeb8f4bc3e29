"""Norms over rows, groups and channels, which stay float32; their kernels sum in another order than torch, so that the
last bits differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from quant.ops.planning import Lines, PlanCall, Unplanned, integer
from quant.ops.registry import plans_reals
from quant.runtime.module_call import ModuleCall
from quant.runtime.module_calls import (
    EPSILON,
    INSTANCE_NORMS,
    GroupNormCall,
    InstanceNormCall,
    NormCall,
    RmsNormCall,
)
from quant.runtime.trees import Attr

N = TypeVar("N", bound=ModuleCall)


@plans_reals(F.layer_norm, exact=False)
def layer_norm_function(call: PlanCall) -> Lines:
    """`F.layer_norm` over the last dimension, with parameters of the model."""
    shape = call.setting(1, "normalized_shape")
    if len(shape) != 1:
        raise Unplanned("it normalises over several dimensions")
    settings = {**_affine(call), "eps": float(call.setting(4, "eps", 1e-5))}
    if settings["weight"] is None:  # which would say how many values a row has to have
        settings["size"] = shape[0]
    return [("layer_norm", {"x": call.tensor(), **settings})]


@plans_reals(F.rms_norm, exact=False)
def rms_norm_function(call: PlanCall) -> Lines:
    """`F.rms_norm` over the last dimension, with a weight of the model."""
    shape = call.setting(1, "normalized_shape")
    if len(shape) != 1:
        raise Unplanned("it normalises over several dimensions")
    weight = call.argument(2, "weight")
    if weight is not None and not isinstance(weight, Attr):
        raise Unplanned("its weight is computed at run time")
    constant = None if weight is None else call.values.constant(weight)
    eps = float(call.setting(3, "eps", EPSILON))
    return [("rms_norm", {"x": call.tensor(), "weight": constant, "eps": eps, "size": shape[0]})]


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


@plans_reals(*INSTANCE_NORMS, exact=False)
def instance_norm(call: PlanCall) -> InstanceNormCall:
    """An instance norm of a batch, without running statistics, whose parameters are float32."""
    return _of_module(call, partial(InstanceNormCall, rank=len(call.values.shape(call.tensor()))))


@plans_reals(nn.RMSNorm, exact=False)
def rms_norm(call: PlanCall) -> RmsNormCall:
    """A norm by the root mean square whose weight is float32."""
    return _of_module(call, RmsNormCall)


def _of_module(call: PlanCall, kind: Callable[[int, tuple[int, ...], str], N]) -> N:
    module = call.module
    planned = kind(call.out, (call.tensor().index,), call.node.target)
    if module is None or len(call.args) != 1 or call.kwargs or not planned.holds(module):
        raise Unplanned("it is computed in float")
    if any(one is not None and one.dtype != torch.float32 for one in module._parameters.values()):
        raise Unplanned("it is computed in float")
    return planned
