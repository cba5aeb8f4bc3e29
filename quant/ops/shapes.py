"""Calls that look at a tensor's shape alone: integers serve them as well as reals, and a plan knows shapes anyway."""

from __future__ import annotations

import operator

import torch

from quant.graph import Node, Ref
from quant.ops.call import is_call_of
from quant.ops.planning import PlanCall, RankCheck, RankOf, ShapeOf, SizeOf, Symbol

RANKS = frozenset({"dim", "ndimension"})
SIZES = frozenset({torch.numel, len, "size", "numel", "nelement", "stride"}) | RANKS
SHAPE, RANK = "shape", "ndim"
"""Attributes."""

PYTHONS = frozenset(function for function in vars(operator).values() if callable(function))
"""Comparisons and arithmetic."""


def reads_only_shape(node: Node) -> bool:
    """Whether a call looks at a tensor's shape alone."""
    return _attribute(node) in (SHAPE, RANK) or is_call_of(node, SIZES)


def reads_only_rank(node: Node) -> bool:
    """Whether a call asks a tensor for the number of its dimensions and nothing else."""
    return _attribute(node) == RANK or is_call_of(node, RANKS)


def symbol_of(call: PlanCall) -> Symbol | None:
    """What a call that reads a shape gives, where it costs nothing to know it; None for any other."""
    if call.kwargs or not call.args or not isinstance(call.args[0], Ref):
        return None
    symbol = _symbol(call, call.args[0], call.args[1:])
    if symbol is not None:
        call.values.tensor(Ref(symbol.source))
    return symbol


def _symbol(call: PlanCall, x: Ref, others: tuple[object, ...]) -> Symbol | None:
    node = call.node
    if reads_only_rank(node):
        return RankOf(x.index)
    place = others[0] if len(others) == 1 and isinstance(others[0], int) else None
    is_size = node.kind == "method" and node.target == "size"
    if _attribute(node) == SHAPE or (is_size and not others):
        return ShapeOf(x.index)
    if is_size and place is not None:
        return SizeOf(x.index, place)
    known = call.values.symbol(x)
    if isinstance(known, ShapeOf) and node.target is operator.getitem and place is not None:
        return SizeOf(known.source, place)
    if isinstance(known, RankOf) and not any(isinstance(other, Ref) for other in others):
        return _of_rank(node, known)
    return None


def _of_rank(node: Node, rank: RankOf) -> Symbol | None:
    """What follows from the number of dimensions, which that of the native call's inputs decides."""
    if node.kind == "guard":
        return RankCheck(rank.source)
    return RankOf(rank.source) if is_call_of(node, PYTHONS) else None


def _attribute(node: Node) -> str:
    """The attribute that a call reads; '' where it reads none."""
    return str(node.args[1]) if node.kind == "function" and node.target is getattr else ""
