"""Softmax, which stays float32; its kernel sums in another order than torch, so that the last bits differ."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from quant.ops.planning import BEFORE, Lines, PlanCall, Unplanned, integer
from quant.ops.registry import plans_reals
from quant.runtime.module_calls import SoftmaxCall


@plans_reals(torch.softmax, F.softmax, "softmax", exact=False)
def softmax(call: PlanCall) -> Lines:
    """A softmax of float32 over one dimension."""
    return _over(call, logarithm=False)


@plans_reals(torch.log_softmax, F.log_softmax, "log_softmax", exact=False)
def log_softmax(call: PlanCall) -> Lines:
    """The logarithm of one."""
    return _over(call, logarithm=True)


@plans_reals(nn.Softmax, nn.LogSoftmax, exact=False)
def softmax_layer(call: PlanCall) -> SoftmaxCall:
    """A softmax over the last dimension, as a layer."""
    module, x = call.module, call.tensor()
    planned = SoftmaxCall(call.out, (x.index,), call.node.target, len(call.values.shape(x)))
    if module is None or len(call.args) != 1 or call.kwargs or not planned.holds(module):
        raise Unplanned("it is computed in float")
    return planned


def _over(call: PlanCall, *, logarithm: bool) -> Lines:
    x, dim = call.tensor(), call.setting(1, "dim")
    if len(call.args) > 2 or call.kwargs.get("dtype") not in (None, torch.float32) or dim is None:
        raise Unplanned("it is computed in float")
    last = len(call.values.shape(x)) - 1
    dim = integer("dim", dim) % (last + 1)
    if dim == last:
        return [("softmax", {"x": x, "logarithm": logarithm})]
    turn = {"dim0": dim, "dim1": last}
    softmax = ("softmax", {"x": BEFORE, "logarithm": logarithm})
    return [("transpose", {"x": x, **turn}), softmax, ("transpose", {"x": BEFORE, **turn})]
