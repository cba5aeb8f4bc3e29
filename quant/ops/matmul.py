"""Products of two activations."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quant.folding import Transposed, depends_on_nothing
from quant.ops.call import Call, StaysFloat
from quant.ops.linear import Linear, outputs_of
from quant.ops.lowering import Context, Kernel
from quant.ops.operator import Operator
from quant.ops.registry import Recognised, recognises
from quant.ops.step import Step


@dataclass(frozen=True)
class Matmul(Operator):
    """The matrix product of two activations."""

    name: ClassVar[str] = "matmul"
    anchor: ClassVar[bool] = True
    gives_reals: ClassVar[bool] = True

    def lower(self, step: Step, context: Context) -> Kernel:
        if step.output not in context.emitted:
            return Kernel("matmul_f32", factors(step, context, torch.ones(())))
        scale = context.ranges[step.output].scale
        return Kernel("matmul", (*factors(step, context, scale), *context.limits(step, None)))


def factors(step: Step, context: Context, output_scale: Tensor) -> tuple[Any, ...]:
    """The first arguments of a product's kernel: both values with their zero points, and s_a * s_b / s_y."""
    a, b = step.inputs
    multiplier = context.ranges[a].scale * context.ranges[b].scale / output_scale
    q_a, q_b = context.integers(a), context.integers(b)
    return q_a, context.zero_point(a), q_b, context.zero_point(b), float(multiplier)


@recognises(torch.matmul, torch.mm, torch.bmm, operator.matmul, "matmul", "mm", "bmm")
def matmul(call: Call) -> Recognised:
    """A product of two activations, or of one with a weight (in, out) of the model."""
    weight = call.get(1, "other" if "other" in call.node.kwargs else "mat2")
    if outputs_of(call, weight) is not None and not depends_on_nothing(call.graph, call.get(0, "input")):
        x = call.activation(0)
        if call.rank(x) >= 2:
            return Recognised(Linear(weight=Transposed(weight)), (x,))
    one, two = call.activation(0), call.activation(1, "other")
    if min(call.rank(one), call.rank(two)) < 2:
        raise StaysFloat("a product with a vector")
    return Recognised(Matmul(), (one, two))
