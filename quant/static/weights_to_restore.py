"""Finds the parameters that a user's forward reads and int8 layers replace (`runtime/restored_weights.py`)."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from quant.fusion.fused_graph import FusedGraph
from quant.graph import Kind
from quant.ops.operator import Weighted
from quant.ops.step import Step
from quant.runtime.names import child_name, full_name
from quant.runtime.restored_weights import RestoredTensor, WeightsToRestore
from quant.runtime.trees import Attr, Ref

SAME = ("clone", "contiguous", "detach", "float", "to")
"""Methods that give the numbers that they get."""


def weights_to_restore(fused: FusedGraph) -> WeightsToRestore:
    """Those of the functional layers of a captured module."""
    tensors: list[RestoredTensor] = []
    for step in fused.steps:
        if isinstance(step.operator, Weighted) and fused.graph.nodes[step.nodes[0]].kind is not Kind.MODULE:
            tensors += _tensors(step, step.operator, fused)
    return WeightsToRestore(tensors)


def _tensors(step: Step, layer: Weighted, fused: FusedGraph) -> Iterator[RestoredTensor]:
    key = child_name(step.name)
    for is_weight, value in ((True, layer.weight), (False, layer.bias)):
        sliced = False
        if isinstance(value, Ref):
            node = fused.graph.nodes[value.index]
            owner = fused.graph.nodes[step.nodes[0]].owner
            if node.target is operator.getitem and isinstance(node.args[1], slice):
                value, sliced = node.args[0], True
            else:  # computed from parts: the module reads it as its `weight`
                path = full_name(owner, "weight" if is_weight else "bias")
                # A parameter that is turned or scaled at once would be so twice; one that is normalised stays the same.
                value = None if Attr(path) in node.args and node.target not in SAME else Attr(path)
        if isinstance(value, Attr):
            yield RestoredTensor(value.path, sliced, key, is_weight)
