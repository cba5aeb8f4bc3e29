"""Finds the parameters that a user's forward reads and int8 layers replace (`runtime/restored_weights.py`)."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator

from torch import Tensor, nn

from quant.folding import Transposed, parameter, paths_behind
from quant.fusion.fused_graph import FusedGraph
from quant.graph import Kind, evaluate
from quant.ops.operator import Weighted
from quant.ops.step import Step
from quant.runtime.names import child_name, full_name
from quant.runtime.restored_weights import RestoredTensor, WeightsToRestore
from quant.runtime.trees import Attr, Ref, map_leaves

SAME = 0.01
"""What is computed from a weight that was computed already may differ by this much of it: a normalised one does."""


def weights_to_restore(fused: FusedGraph, root: nn.Module) -> WeightsToRestore:
    """Those of the functional layers of a captured module."""
    tensors: list[RestoredTensor] = []
    for step in fused.steps:
        if isinstance(step.operator, Weighted) and fused.graph.nodes[step.nodes[0]].kind is not Kind.MODULE:
            tensors += _tensors(step, step.operator, fused, root)
    return WeightsToRestore(tensors)


def _computed_otherwise(value: Ref, name: str, fused: FusedGraph, root: nn.Module) -> bool:
    """Whether the parameter `name` cannot be given the weight that is computed from it.

    One that is turned or scaled would be so twice; a copy and a normalised weight stay what they are.
    """
    graph = fused.graph
    if name not in paths_behind(graph, value):
        return False  # the module computes it of parts
    once = parameter(value, graph, root)
    assert once is not None

    def again(index: int) -> Tensor:
        args, kwargs = map_leaves(
            lambda leaf: once if isinstance(leaf, Attr) and leaf.path == name else leaf,
            (graph.nodes[index].args, graph.nodes[index].kwargs),
        )
        result: Tensor = evaluate(dataclasses.replace(graph.nodes[index], args=args, kwargs=kwargs), root, again)
        return result

    try:
        twice = again(value.index)
    except (RuntimeError, IndexError):  # the result has another shape, which the calls do not take
        return True
    return twice.shape != once.shape or bool((twice - once).norm() > SAME * once.norm())


def _tensors(step: Step, layer: Weighted, fused: FusedGraph, root: nn.Module) -> Iterator[RestoredTensor]:
    key = child_name(step.name)
    for is_weight, value in ((True, layer.weight), (False, layer.bias)):
        sliced, turned = False, isinstance(value, Transposed)
        if isinstance(value, Transposed):
            value = value.source if isinstance(value.source, Attr) else None
        if isinstance(value, Ref):
            node = fused.graph.nodes[value.index]
            if node.target is operator.getitem and isinstance(node.args[1], slice):
                value, sliced = node.args[0], True
            else:  # computed from parts: the module reads it as its `weight`
                name = full_name(fused.graph.nodes[step.nodes[0]].owner, "weight" if is_weight else "bias")
                value = None if _computed_otherwise(value, name, fused, root) else Attr(name)
        if isinstance(value, Attr):
            yield RestoredTensor(value.path, sliced, key, is_weight, turned)
