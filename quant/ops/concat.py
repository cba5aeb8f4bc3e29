"""Concatenations and stacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from quant.kernels.reference_plan import Register
from quant.ops.call import Call, StaysFloat
from quant.ops.lowering import Context, SameCall
from quant.ops.operator import Operator
from quant.ops.planning import Lines, PlanCall, Unplanned, before, integer
from quant.ops.registry import Recognised, plans_reals, recognises
from quant.ops.step import Step
from quant.runtime.trees import Attr, Ref


@dataclass(frozen=True)
class Concat(Operator):
    """A concatenation; inputs of another range are rescaled to its own."""

    name: ClassVar[str] = "cat"
    shares_range: ClassVar[bool] = True
    dim: Any = 0

    def lower(self, step: Step, context: Context) -> SameCall:
        """The captured call on integers, after inputs of another range are rescaled."""
        scale, zero_point = context.ranges[step.output].scale, context.zero_point(step.output)
        others = [
            value
            for value in dict.fromkeys(step.inputs)
            if (context.scale(value), context.zero_point(value)) != (float(scale), zero_point)
        ]
        ratios = {value: float(context.ranges[value].scale / scale) for value in others}
        ids = {value: context.integers(value).index for value in others}
        return SameCall({ids[one]: (context.zero_point(one), ratios[one], zero_point) for one in others})

    def plan(self, call: PlanCall) -> Lines:
        tensors = call.argument(0, "tensors")
        if not isinstance(tensors, (tuple, list)) or not all(isinstance(one, Ref) for one in tensors):
            raise Unplanned("it joins what is no activation")
        registers = tuple(map(call.values.tensor, tensors))
        rescaling = _rescaling([one.index for one in registers], call.rescaled)
        return [("cat", {"tensors": registers, "dim": integer("dim", self.dim), **rescaling})]


@dataclass(frozen=True)
class Stack(Concat):
    """A concatenation along a new dimension."""

    def plan(self, call: PlanCall) -> Lines:
        [(join, settings)] = super().plan(call)
        return _stacked(join, settings, integer("dim", self.dim), call)


def _stacked(join: str, settings: dict[str, Any], dim: int, call: PlanCall) -> Lines:
    """A concatenation of tensors that get the dimension first."""
    tensors: tuple[Register, ...] = settings["tensors"]
    dim %= len(call.values.shape(tensors[0])) + 1
    wider: Lines = [("unsqueeze", {"x": one, "dim": dim}) for one in tensors]
    joined = tuple(before(len(tensors) - place) for place in range(len(tensors)))
    return [*wider, (join, {**settings, "tensors": joined, "dim": dim})]


@plans_reals(torch.stack)
def stack_in_reals(call: PlanCall) -> Lines:
    """Of float values that are no parameters or buffers."""
    tensors = call.argument(0, "tensors")
    if not isinstance(tensors, (tuple, list)) or not all(isinstance(one, Ref) for one in tensors):
        raise Unplanned("it joins what is no activation")
    settings = {"tensors": tuple(map(call.values.tensor, tensors))}
    return _stacked("cat_f32", settings, integer("dim", call.setting(1, "dim", 0)), call)


@plans_reals(torch.cat, torch.concat, torch.concatenate)
def concat_in_reals(call: PlanCall) -> Lines:
    """Of float values, of which some may be parameters or buffers."""
    tensors = call.argument(0, "tensors")
    if not isinstance(tensors, (tuple, list)):
        raise Unplanned("it joins a list that is built at run time")
    lines: Lines = [("constant", {"value": call.values.constant(one)}) for one in tensors if isinstance(one, Attr)]
    constants, parts = iter(range(len(lines), 0, -1)), []
    for one in tensors:
        if not isinstance(one, (Attr, Ref)):
            raise Unplanned("it joins what is no activation")
        parts.append(before(next(constants)) if isinstance(one, Attr) else call.values.tensor(one))
    dim = integer("dim", call.setting(1, "dim", 0))
    return [*lines, ("cat_f32", {"tensors": tuple(parts), "dim": dim})]


def _rescaling(registers: list[int], rescaled: dict[int, tuple[int, float, int]]) -> dict[str, Any]:
    """Zero points and multipliers that rescale the inputs of a concatenation; empty where all share its range."""
    if not rescaled:
        return {}
    [output_zero_point] = {numbers[2] for numbers in rescaled.values()}
    numbers = [rescaled.get(register, (output_zero_point, 1.0, output_zero_point)) for register in registers]
    zero_points, multipliers, _ = zip(*numbers, strict=True)
    return {"zero_points": zero_points, "multipliers": multipliers, "output_zero_point": output_zero_point}


@recognises(torch.cat, torch.concat, torch.concatenate)
def concat(call: Call) -> Recognised:
    """`torch.cat`."""
    return _joined(Concat(call.get(1, "dim", 0)), call)


@recognises(torch.stack)
def stack(call: Call) -> Recognised:
    """`torch.stack`."""
    return _joined(Stack(call.get(1, "dim", 0)), call)


def _joined(operator: Concat, call: Call) -> Recognised:
    """`operator`, on a list of tensors that are all activations."""
    tensors = call.get(0, "tensors")
    if not isinstance(tensors, (tuple, list)):
        raise StaysFloat("it joins a list that is built at run time")
    inputs = []
    for tensor in tensors:
        if not isinstance(tensor, Ref):
            raise StaysFloat("it joins a constant")
        meta = call.graph.nodes[tensor.index].meta
        if meta is None or meta.dtype != torch.float32 or meta.layout != torch.strided:
            raise StaysFloat("it joins what is not float32, or is sparse")
        inputs.append(tensor.index)
    return Recognised(operator, tuple(inputs))
