"""Calls that read only a tensor's shape: they work on integers too, and a plan knows shapes anyway."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable
from functools import partial, reduce
from typing import Any

import torch

from quant.graph import Kind, Node
from quant.kernels.plan_sizes import OPERATIONS, Arithmetic
from quant.kernels.reference_plan import Register
from quant.ops.call import is_call_of
from quant.ops.planning import (
    CountOf,
    Lines,
    NumberOf,
    PartsOf,
    PlanCall,
    QuotientOf,
    RankCheck,
    RankOf,
    ShapeOf,
    Symbol,
    Unplanned,
)
from quant.runtime.forms import form_of
from quant.runtime.trees import Ref

RANKS = frozenset({"dim", "ndimension"})
SIZES = frozenset({torch.numel, len, form_of, "size", "numel", "nelement", "stride"}) | RANKS
COUNTS = frozenset({torch.numel, "numel", "nelement"})
SHAPE, RANK = "shape", "ndim"
"""Attributes."""

ARITHMETIC: dict[Callable[..., Any], Callable[[Any, Any], Arithmetic]] = {
    **{function: partial(Arithmetic, name) for name, function in OPERATIONS.items()},
    operator.gt: lambda left, right: Arithmetic("<", right, left),
    operator.ge: lambda left, right: Arithmetic("<=", right, left),
}
"""Python's functions of two ints that plans compute."""

ROUNDINGS: dict[Callable[..., Any], Callable[[Any, Any], Arithmetic]] = {
    math.floor: partial(Arithmetic, "//"),
    math.ceil: lambda left, right: Arithmetic("-", 0, Arithmetic("//", Arithmetic("-", 0, left), right)),
}
"""What makes an int of a quotient of two."""

PYTHONS = frozenset(function for function in vars(operator).values() if callable(function))
"""Comparisons and arithmetic."""


def reads_only_shape(node: Node) -> bool:
    """Whether a call reads only a tensor's shape."""
    return _attribute(node) in (SHAPE, RANK) or is_call_of(node, SIZES)


def reads_only_rank(node: Node) -> bool:
    """Whether a call reads only a tensor's number of dimensions."""
    return _attribute(node) == RANK or is_call_of(node, RANKS)


def planned_shape(call: PlanCall) -> Symbol | Lines | None:
    """The symbolic value of a call that reads a shape; None for any other call.

    A guard on a shape is a check of the native call: of its inputs' dimensions, or that a tensor has so many parts.
    """
    if call.kwargs or not any(isinstance(one, Ref) for one in call.args):
        return None
    known = call.symbol()
    if call.node.kind is Kind.GUARD:
        return _checked(known, call.args[1])
    symbol = _computed(call)
    if symbol is None and isinstance(call.args[0], Ref):
        symbol = _read(call, call.args[0], call.args[1:]) or _derived(call, known, call.args[1:])
    if symbol is not None:
        _check_source(call, Ref(symbol.source))
    return symbol


def _check_source(call: PlanCall, x: Ref) -> None:
    """Raise Unplanned where a size is of what no plan has: indices have sizes, too."""
    try:
        call.values.indices(x)
    except Unplanned:
        call.values.tensor(x)


def _checked(known: Symbol | None, expected: object) -> Symbol | Lines | None:
    if isinstance(known, RankOf) and not isinstance(expected, Ref):
        return RankCheck(known.source)
    if isinstance(known, CountOf) and expected == known.parts.count:
        return known.parts.check()
    if isinstance(known, NumberOf) and isinstance(expected, int):
        return [("holds", {"x": Register(known.source), "size": known.number, "equals": int(expected)})]
    return None


def _computed(call: PlanCall) -> Symbol | None:
    """The result of Python's arithmetic of numbers of which some follow from sizes."""
    if call.node.kind is not Kind.FUNCTION or not isinstance(call.node.target, Hashable):
        return None
    symbols = [call.values.symbol(one) for one in call.args if isinstance(one, Ref)]
    if not symbols or symbols[0] is None:
        return None
    source = symbols[0].source
    if len(call.args) == 1 and isinstance(symbols[0], QuotientOf) and call.node.target in ROUNDINGS:
        return NumberOf(source, ROUNDINGS[call.node.target](symbols[0].left, symbols[0].right))
    numbers = [call.number(one) for one in call.args]
    if None in numbers:
        return None
    if len(numbers) == 2 and call.node.target is operator.truediv:
        return QuotientOf(source, *numbers)
    if len(numbers) == 2 and call.node.target in ARITHMETIC:
        return NumberOf(source, ARITHMETIC[call.node.target](*numbers))
    if len(numbers) == 1 and call.node.target is operator.neg:
        return NumberOf(source, Arithmetic("-", 0, numbers[0]))
    return None


def _read(call: PlanCall, x: Ref, others: tuple[object, ...]) -> Symbol | None:
    """A value read from a tensor's shape."""
    node = call.node
    if reads_only_rank(node):
        return RankOf(x.index)
    is_size = node.kind is Kind.METHOD and node.target == "size"
    if _attribute(node) == SHAPE or (is_size and not others):
        return ShapeOf(x.index)
    if is_call_of(node, COUNTS) and not others:
        return _count(call, x)
    place = _place(others)
    return NumberOf(x.index, Register(x.index, place)) if is_size and place is not None else None


def _count(call: PlanCall, x: Ref) -> Symbol | None:
    """The number of values: the product of the sizes."""
    rank = len(call.values.shape(Register(x.index))) if call.values.dtype(Register(x.index)) is not None else 0
    if rank == 0:
        return None
    sizes: list[Register | Arithmetic] = [Register(x.index, dim) for dim in range(rank)]
    return NumberOf(x.index, reduce(lambda left, right: Arithmetic("*", left, right), sizes))


def _derived(call: PlanCall, known: Symbol | None, others: tuple[object, ...]) -> Symbol | None:
    """A value derived from one that was read before."""
    place = _place(others)
    if isinstance(known, ShapeOf) and call.node.target is operator.getitem and place is not None:
        return NumberOf(known.source, Register(known.source, place))
    if isinstance(known, PartsOf) and call.node.target is len:
        return CountOf(known.source, known)
    if isinstance(known, RankOf) and is_call_of(call.node, PYTHONS) and not any(isinstance(one, Ref) for one in others):
        return RankOf(known.source)
    return None


def _place(others: tuple[object, ...]) -> int | None:
    """The index, where it is the only other argument."""
    return others[0] if len(others) == 1 and isinstance(others[0], int) else None


def _attribute(node: Node) -> str:
    """The attribute that a call reads; '' where it reads none."""
    return str(node.args[1]) if node.kind is Kind.FUNCTION and node.target is getattr else ""
