"""An elementwise operator that nobody else knows, as one file of a family in quant/ops/ would add it;
`test_binary_operators.py` imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from quant.kernels.reference_ops import reference_kernel
from torch import Tensor

from quant.ops.call import Call
from quant.ops.lowering import Context, Kernel
from quant.ops.operator import Operator
from quant.ops.registry import Recognised, recognises
from quant.ops.step import Step


@dataclass(frozen=True)
class Hypot(Operator):
    """sqrt(a * a + b * b)."""

    name: ClassVar[str] = "hypot"

    def lower(self, step: Step, context: Context) -> Kernel:
        a, b = step.inputs
        scale = context.ranges[step.output].scale
        one, two = (float(context.ranges[value].scale / scale) for value in (a, b))
        inputs = (context.integers(a), context.zero_point(a), one, context.integers(b), context.zero_point(b), two)
        return Kernel("hypot", (*inputs, context.zero_point(step.output)))


@reference_kernel("hypot")
def hypot(
    q_a: Tensor,
    a_zero_point: int,
    a_multiplier: float,
    q_b: Tensor,
    b_zero_point: int,
    b_multiplier: float,
    output_zero_point: int,
) -> Tensor:
    """round(sqrt(a * a + b * b)) + z_y with a = (q_a - z_a) * m_a, in uint8."""
    a, b = (q_a.float() - a_zero_point) * a_multiplier, (q_b.float() - b_zero_point) * b_multiplier
    return ((a * a + b * b).sqrt().round() + output_zero_point).clamp(0, 255).to(torch.uint8)


@recognises(torch.hypot)
def recognise_hypot(call: Call) -> Recognised:
    """`torch.hypot` of two activations."""
    return Recognised(Hypot(), (call.activation(0), call.activation(1, "other")))
