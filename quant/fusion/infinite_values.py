"""Finds layers that read infinities from the forward itself, such as those of a mask, and so have to stay float.

A softmax, maximum or comparison of a masked value is finite again. A layer that reads the value directly has infinite
or NaN outputs in float, which integers cannot represent. Only infinities in the graph are detected: a number in a call
that fills, or a buffer. Outputs for infinities in the data become NaN (`runtime/nonfinite.py`).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.graph import Graph, Kind, Node
from quant.ops.call import StaysFloat, is_call_of
from quant.ops.registry import Recognised, recognise
from quant.ops.views import View
from quant.runtime.names import attribute
from quant.runtime.trees import Attr, Ref, leaves

REASON = "its input holds infinite values that the forward puts there, which no integer says"

FILLS = frozenset({
    torch.masked_fill, torch.where, torch.full, torch.full_like, torch.index_fill, torch.fill, F.pad, "masked_fill",
    "masked_fill_", "where", "new_full", "index_fill", "index_fill_", "fill_",
})  # fmt: skip
"""Calls that put a number of the forward's into their result."""

PASSES = FILLS | {
    operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul, operator.neg, torch.add,
    torch.sub, torch.mul, torch.neg, torch.cat, torch.stack, "add", "add_", "sub", "sub_", "mul", "mul_", "neg",
}  # fmt: skip
"""Calls whose result is infinite where what they read is, besides views and layers."""


def layers_of_infinities(graph: Graph, root: nn.Module) -> dict[str, str]:
    """The layers to leave float: their names within `root`, or the owner of a functional one, and why."""
    reasons: dict[str, str] = {}
    infinite: set[int] = set()
    known: dict[str, bool] = {}

    def holds(leaf: Any) -> bool:
        if isinstance(leaf, Attr):
            if leaf.path not in known:
                known[leaf.path] = _has_infinities(attribute(root, leaf.path))
            return known[leaf.path]
        return isinstance(leaf, Ref) and leaf.index in infinite

    for node in graph.nodes:
        if node.kind in (Kind.INPUT, Kind.GUARD):
            continue
        arguments = [*leaves((node.args, node.kwargs))]
        if is_call_of(node, FILLS) and any(map(_is_infinite, arguments)):
            infinite.add(node.index)
        elif any(map(holds, arguments)):
            known_as = _recognised(node, graph, root)
            reads = known_as is not None and not infinite.isdisjoint(known_as.inputs)
            if known_as is not None and reads and known_as.operator.anchor:
                reasons[node.target if node.kind is Kind.MODULE else node.owner] = REASON
            passes = (
                known_as is not None and reads and (known_as.operator.anchor or isinstance(known_as.operator, View))
            )
            if passes or is_call_of(node, PASSES):
                infinite.add(node.index)
    return reasons


def _recognised(node: Node, graph: Graph, root: nn.Module) -> Recognised | None:
    """What a call is in integers; None where it is nothing there."""
    try:
        return recognise(node, graph, root)
    except StaysFloat:
        return None


def _is_infinite(leaf: Any) -> bool:
    return isinstance(leaf, float) and math.isinf(leaf)


def _has_infinities(value: Any) -> bool:
    """Of a buffer: a parameter with an infinity is an error elsewhere."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or not value.is_floating_point():
        return False
    return value.layout == torch.strided and not value.is_meta and bool(torch.isinf(value).any())
