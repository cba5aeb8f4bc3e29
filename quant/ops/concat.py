"""Concatenations and stacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from quant.graph import Ref
from quant.ops.call import Call, StaysFloat
from quant.ops.lowering import Context, Moved
from quant.ops.operator import Operator
from quant.ops.registry import Recognised, recognises
from quant.ops.step import Step


@dataclass(frozen=True)
class Concat(Operator):
    """A concatenation or a stack, of values that have its range or are given it."""

    name: ClassVar[str] = "cat"
    shares_range: ClassVar[bool] = True

    def lower(self, step: Step, context: Context) -> Moved:
        """A move, in which inputs of another range are rescaled."""
        scale, zero_point = context.ranges[step.output].scale, context.zero_point(step.output)
        others = [
            value
            for value in dict.fromkeys(step.inputs)
            if (context.scale(value), context.zero_point(value)) != (float(scale), zero_point)
        ]
        ratios = {value: float(context.ranges[value].scale / scale) for value in others}
        ids = {value: context.integers(value).index for value in others}
        return Moved({ids[one]: (context.zero_point(one), ratios[one], zero_point) for one in others})


@recognises(torch.cat, torch.concat, torch.concatenate, torch.stack)
def concat(call: Call) -> Recognised:
    """Tensors that are all activations."""
    tensors = call.get(0, "tensors")
    if not isinstance(tensors, (tuple, list)):
        raise StaysFloat("it joins a list made at run time")
    inputs = []
    for tensor in tensors:
        if not isinstance(tensor, Ref):
            raise StaysFloat("it joins a constant")
        meta = call.graph.nodes[tensor.index].meta
        if meta is None or meta.dtype != torch.float32 or meta.layout != torch.strided:
            raise StaysFloat("it joins what is not float32, or is sparse")
        inputs.append(tensor.index)
    return Recognised(Concat(), tuple(inputs))
