"""Functions of one float32 value, and sums and means over dimensions, between steps that stay float32.

Negation, absolute values, inverse roots and small powers have torch's bits. The others differ in the last ones: their
kernels compute other polynomials than torch's, and add in another order.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quant.kernels.plan_sizes import Arithmetic
from quant.kernels.reference_plan import Register
from quant.ops.planning import BEFORE, Lines, PlanCall, Unplanned, before, integer
from quant.ops.registry import Target, plans_reals
from quant.runtime.module_calls import FunctionCall

EXACT: dict[str, tuple[Target, ...]] = {
    "neg": (operator.neg, torch.neg, torch.negative, "neg", "negative"),
    "abs": (operator.abs, torch.Tensor.__abs__, torch.abs, "abs"),
    "rsqrt": (torch.rsqrt, "rsqrt"),
}
"""Word of a plan's text -> the calls that it stands for; their bits are torch's."""

ROUNDED: dict[str, tuple[Target, ...]] = {
    "sqrt": (torch.sqrt, "sqrt"),  # torch's own is not always the nearest float32
    "exp": (torch.exp, "exp"),
    "sigmoid": (torch.sigmoid, F.sigmoid, "sigmoid"),
    "tanh": (torch.tanh, F.tanh, "tanh"),
    "cos": (torch.cos, "cos"),
    "sin": (torch.sin, "sin"),
    "gelu": (F.gelu,),
}
"""The same of those that differ from torch in the last bits."""


def function(call: PlanCall, by: str) -> Lines:
    """A function of each value of a tensor, and of nothing else."""
    if len(call.args) + len(call.kwargs) != 1:
        raise Unplanned("it is computed in float")
    return [("unary_f32", {"x": call.tensor(), "by": by})]


for _word, _targets in EXACT.items():
    plans_reals(*_targets)(partial(function, by=_word))
for _word, _targets in ROUNDED.items():
    plans_reals(*_targets, exact=False)(partial(function, by=_word))


@plans_reals(nn.Sigmoid, nn.Tanh, nn.GELU, exact=False)
def function_layer(call: PlanCall) -> FunctionCall:
    """The same as a layer."""
    planned = FunctionCall(call.out, (call.tensor().index,), call.node.target)
    if call.module is None or len(call.args) != 1 or call.kwargs or not planned.holds(call.module):
        raise Unplanned("it is computed in float")
    return planned


@plans_reals(F.glu, exact=False)
def gated(call: PlanCall) -> Lines:
    """The first half along a dimension times the sigmoid of the second."""
    x, dim = call.tensor(), integer("dim", call.setting(1, "dim", -1))
    rank = len(call.values.shape(x))
    dim %= rank
    # Not two parts of a chunk: of three values they are two and one, which a product broadcasts.
    sizes = [Register(x.index, place) for place in range(rank)]
    halves = (*sizes[:dim], 2, Arithmetic("//", sizes[dim], 2), *sizes[dim + 1 :])
    return [
        ("reshape", {"x": x, "shape": halves}),
        ("select", {"x": BEFORE, "dim": dim, "index": 1}),
        ("unary_f32", {"x": BEFORE, "by": "sigmoid"}),
        ("select", {"x": before(3), "dim": dim, "index": 0}),
        ("binary_f32", {"a": BEFORE, "b": before(2), "by": "mul"}),
    ]


@plans_reals(F.hardswish, F.hardsigmoid, exact=False)
def hard_function(call: PlanCall) -> Lines:
    """`F.hardsigmoid`, and its product with its argument, that leave their input as it is."""
    if call.setting(1, "inplace", False):
        raise Unplanned("it writes to its input")
    x = call.tensor()
    lines: Lines = [
        ("number_f32", {"x": x, "by": "add", "number": 3.0}),
        ("clamp", {"x": BEFORE, "low": 0.0, "high": 6.0}),
        ("number_f32", {"x": BEFORE, "by": "div", "number": 6.0}),
    ]
    return [*lines, ("binary_f32", {"a": x, "b": BEFORE, "by": "mul"})] if call.node.target is F.hardswish else lines


@plans_reals(operator.pow, torch.Tensor.__pow__, torch.pow, "pow")
def power(call: PlanCall) -> Lines:
    """The second or third power, by products as torch forms it."""
    if len(call.args) + len(call.kwargs) != 2:
        raise Unplanned("it is computed in float")
    x, exponent = call.tensor(), call.setting(1, "exponent")
    if exponent not in (2, 3):
        raise Unplanned(f"the power {exponent} has no native kernel")
    square = ("binary_f32", {"a": x, "b": x, "by": "mul"})
    return [square] if exponent == 2 else [square, ("binary_f32", {"a": BEFORE, "b": x, "by": "mul"})]


@plans_reals(torch.square, "square")
def square(call: PlanCall) -> Lines:
    """The product with itself."""
    if len(call.args) + len(call.kwargs) != 1:
        raise Unplanned("it is computed in float")
    x = call.tensor()
    return [("binary_f32", {"a": x, "b": x, "by": "mul"})]


@plans_reals(torch.mean, "mean", exact=False)
def mean(call: PlanCall) -> Lines:
    """The mean over some dimensions or all."""
    return _over(call, "mean")


@plans_reals(torch.sum, "sum", exact=False)
def total(call: PlanCall) -> Lines:
    """The sum over some dimensions or all."""
    return _over(call, "sum")


def _over(call: PlanCall, by: str) -> Lines:
    if len(call.args) > 3 or not set(call.kwargs) <= {"input", "dim", "keepdim", "dtype"}:
        raise Unplanned("it is computed in float")
    if call.setting(3, "dtype") not in (None, torch.float32):
        raise Unplanned("it is computed in float")
    x, dims = call.tensor(), call.setting(1, "dim")
    rank = len(call.values.shape(x))
    chosen: Any = dims if isinstance(dims, (tuple, list)) else [] if dims is None else [dims]
    places = tuple(integer("dim", dim) for dim in chosen) or tuple(range(rank))
    if not places:
        raise Unplanned("a tensor without dimensions has no plan")
    return [("reduce_f32", {"x": x, "by": by, "dim": places, "keepdim": bool(call.setting(2, "keepdim", False))})]
