"""Arithmetic that stays float32: of two tensors, of a tensor and a parameter or buffer, of a tensor and a number."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch

from quant.kernels.reference_plan import Register
from quant.ops.planning import BEFORE, Lines, PlanCall, Unplanned, before
from quant.ops.registry import plans_reals
from quant.runtime.trees import Attr


@dataclass(frozen=True)
class RealForms:
    """An operation of reals in a plan.

    Attributes:
        of_two: its operator with the settings beside both operands.
        with_number, from_number: how a number is the right or the left operand; None where that has no kernel.
    """

    of_two: tuple[str, dict[str, Any]]
    with_number: str
    from_number: str | None

    def lines(self, call: PlanCall) -> Lines:
        """Of two tensors, of which one may be a parameter or buffer, or of a tensor and a number."""
        if len(call.args) + len(call.kwargs) != 2:
            raise Unplanned("it is computed in float")
        left, right = (_plain_number(call.argument(place, name)) for place, name in enumerate(("input", "other")))
        if right is not None:
            return _with_number(call.real(0, "input"), self.with_number, right)
        if left is not None:
            if self.from_number is None:
                raise Unplanned("a number over a tensor has no native kernel")
            return _with_number(call.real(1, "other"), self.from_number, left)
        a, b = call.real(0, "input"), call.real(1, "other")
        op, settings = self.of_two
        if isinstance(a, Register) and isinstance(b, Register):
            return [(op, {"a": a, "b": b, **settings})]
        if isinstance(a, Attr) and isinstance(b, Attr):
            raise Unplanned("it is computed of parameters alone")
        terms = {"a": BEFORE if isinstance(a, Attr) else a, "b": BEFORE if isinstance(b, Attr) else b}
        return [("constant", {"value": a if isinstance(a, Attr) else b}), (op, {**terms, **settings})]


SUM = RealForms(("add_f32", {}), "add", "add")
DIFFERENCE = RealForms(("binary_f32", {"by": "sub"}), "sub", "sub_from")
PRODUCT = RealForms(("binary_f32", {"by": "mul"}), "mul", "mul")
QUOTIENT = RealForms(("binary_f32", {"by": "div"}), "div", None)

plans_reals(operator.add, torch.add, "add")(SUM.lines)
plans_reals(operator.sub, torch.sub, "sub")(DIFFERENCE.lines)
plans_reals(operator.mul, torch.mul, torch.multiply, "mul")(PRODUCT.lines)
plans_reals(operator.truediv, torch.div, "div")(QUOTIENT.lines)


@plans_reals(torch.addcmul, exact=False)
def sum_with_product(call: PlanCall) -> Lines:
    """`torch.addcmul` without a factor; parameters and buffers may be among its operands, but not be both factors."""
    if len(call.args) + len(call.kwargs) != 3:
        raise Unplanned("it is computed in float")
    operands = [call.real(place, name) for place, name in enumerate(("input", "tensor1", "tensor2"))]
    constants: Lines = [("constant", {"value": one}) for one in operands if isinstance(one, Attr)]
    if all(isinstance(one, Attr) for one in operands[1:]):
        raise Unplanned("it is computed of parameters alone")
    added, *factors = _placed(operands, len(constants))
    after = before(-added.index + 1) if added.index < 0 else added
    product = ("binary_f32", {"a": factors[0], "b": factors[1], "by": "mul"})
    return [*constants, product, ("add_f32", {"a": after, "b": BEFORE})]


def _placed(operands: list[Register | Attr], constants: int) -> list[Register]:
    """Operands of the line behind the constants' lines, which stand in their order."""
    places = iter(range(constants, 0, -1))
    return [before(next(places)) if isinstance(one, Attr) else one for one in operands]


def _with_number(x: Register | Attr, by: str, number: float) -> Lines:
    """A tensor, a parameter or a buffer, and a number."""
    lines: Lines = [("constant", {"value": x})] if isinstance(x, Attr) else []
    return [*lines, ("number_f32", {"x": BEFORE if lines else x, "by": by, "number": number})]


def _plain_number(value: object) -> float | None:
    """A number that float32 holds; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and abs(value) < torch.finfo(torch.float32).max else None
