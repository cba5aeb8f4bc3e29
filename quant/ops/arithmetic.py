"""Sums and products of two values, or of a value with constants of the model."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from quant.folding import Affine, ChannelFactor, ChannelShift, depends_on_nothing, own_shape
from quant.graph import TensorMeta
from quant.ops.call import Call, StaysFloat
from quant.ops.lookup import Lookup
from quant.ops.lowering import Context, Kernel
from quant.ops.matmul import factors
from quant.ops.operator import Clampable
from quant.ops.registry import Recognised, recognises
from quant.ops.step import Step
from quant.runtime.trees import Ref

Sign = Literal[1, -1]


@dataclass(frozen=True)
class Add(Clampable):
    """a + b, or a - b (sign -1)."""

    name: ClassVar[str] = "add"
    sign: Sign = 1

    def lower(self, step: Step, context: Context) -> Kernel:
        a, b = step.inputs
        scale = context.ranges[step.output].scale
        one, two = (float(context.ranges[value].scale / scale) for value in (a, b))
        q_a, q_b = context.integers(a), context.integers(b)
        inputs = (q_a, context.zero_point(a), one, q_b, context.zero_point(b), self.sign * two)
        return Kernel("add", (*inputs, *context.limits(step, self.clamp)))


@dataclass(frozen=True)
class Mul(Clampable):
    """a * b, value by value."""

    name: ClassVar[str] = "mul"

    def lower(self, step: Step, context: Context) -> Kernel:
        scale = context.ranges[step.output].scale
        return Kernel("mul", (*factors(step, context, scale), *context.limits(step, self.clamp)))


@recognises(operator.add, operator.iadd, torch.add, "add", "add_")
def add(call: Call) -> Recognised:
    """A sum."""
    return _binary(call, Add())


@recognises(operator.sub, operator.isub, torch.sub, "sub", "sub_")
def subtract(call: Call) -> Recognised:
    """A difference."""
    return _binary(call, Add(sign=-1))


@recognises(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_")
def multiply(call: Call) -> Recognised:
    """A product."""
    return _binary(call, Mul())


@recognises(operator.truediv, operator.itruediv, torch.div, "div", "div_")
def division(call: Call) -> Recognised:
    """Division by a number; by a tensor it stays float."""
    if isinstance(call.get(1, "other"), (int, float)) and len(call.node.args) == 2:
        rounds = call.node.kwargs.get("rounding_mode") is not None
        return _with_number(call, [call.get(0, "input"), call.get(1, "other")], 0, None if rounds else 1)
    raise StaysFloat("division by a tensor is kept in float")


def _binary(call: Call, operator: Add | Mul) -> Recognised:
    args = [call.get(0, "input"), call.get(1, "other")]
    if call.get(2, "alpha") is not None or call.node.kwargs.get("out") is not None:
        raise StaysFloat("it has an alpha or an out")
    numbers = [isinstance(arg, (int, float)) for arg in args]
    if any(numbers):
        place, neutral = numbers.index(False), 1 if isinstance(operator, Mul) else 0
        negates = isinstance(operator, Add) and operator.sign < 0 and place == 1
        return _with_number(call, args, place, None if negates else neutral)
    for place in (0, 1):
        recognised = _per_channel(call, args, place, operator)
        if recognised is not None:
            return recognised
    return Recognised(operator, (call.activation(0), call.activation(1, "other")))


def _per_channel(call: Call, args: list[Any], place: int, operator: Add | Mul) -> Recognised | None:
    """A sum or product with one constant per channel, which is folded into the layer before where possible.

    Args:
        place: index of the constant operand.
    """
    x, constant = args[1 - place], args[place]
    shape = own_shape(call.graph, call.root, constant)
    if shape is None or not isinstance(x, Ref) or depends_on_nothing(call.graph, x):
        return None
    if call.node.meta is None or call.node.meta.dtype != torch.float32:  # a wider constant makes a wider result
        return None
    index = call.activation(1 - place, ("input", "other")[1 - place])
    axis = _channel_axis(shape, call.graph.nodes[index].meta)
    if axis is None:
        return None
    affine: Affine = ChannelFactor(constant, axis)
    if isinstance(operator, Add):
        own_sign, sign = (1, operator.sign) if place == 1 else (operator.sign, 1)  # of x and of the constant
        affine = ChannelShift(constant, axis, sign, own_sign)
    only_folded = axis != 1 or not isinstance(constant, Ref)
    return Recognised(Lookup(per_channel=True, affine=affine, only_folded=only_folded), (index,))


def _channel_axis(shape: tuple[int, ...], meta: TensorMeta | None) -> int | None:
    """1 or -1 where a tensor of `shape` has a number per index of that axis of a value; 0 for a single number."""
    if meta is None or len(meta.shape) < 2 or len(shape) > len(meta.shape):
        return None
    if set(shape) <= {1}:
        return 0
    full = (1,) * (len(meta.shape) - len(shape)) + shape
    for axis in (1, -1):
        expected = [1] * len(full)
        expected[axis] = meta.shape[axis]
        if list(full) == expected:
            return axis
    return None


def _with_number(call: Call, args: list[Any], place: int, neutral: int | None) -> Recognised:
    """A sum or product with a Python number is a function of one value.

    Args:
        place: of the operand that is no number.
        neutral: the number with which that value is the result, as in `sum(values)`, which begins with 0, or where a
            setting that scales is 1; None where there is none.
    """
    if not isinstance(args[place], Ref):
        raise StaysFloat("its operand is no activation")
    return Recognised(Lookup(gives_input=args[1 - place] == neutral), (call.activation(place, "input"),))
