"""One step for each call of a graph: its operator and settings, or the reason that it stays float."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TypeAlias

from torch import nn

from quant.dynamic_decisions import class_with_dynamic_form
from quant.graph import Graph, Kind, Node
from quant.ops.call import StaysFloat
from quant.ops.operator import Float, ShapeOnly, Weighted
from quant.ops.recurrent import Sequence
from quant.ops.registry import Recognised, recognise
from quant.ops.shapes import reads_only_shape
from quant.ops.step import Step
from quant.recipe import QConfig, Recipe
from quant.runtime.names import attribute, full_name
from quant.runtime.trees import Ref

PER_CALL_REASON = "the recipe asks for ranges of each call"
"""Of a layer that convert makes dynamic, where it has such a form."""


class PerCall(StaysFloat):
    """A layer of which the recipe asks for ranges of each call."""


Calls: TypeAlias = dict[int, Recognised | str]
"""By node, its operator as the graph alone decides it, or the reason that it stays float."""


def recognised_calls(graph: Graph, root: nn.Module) -> Calls:
    """What each computation of a graph is, whatever a recipe says."""
    calls: Calls = {}
    for node in graph.nodes:
        if _computes(node):
            try:
                calls[node.index] = recognise(node, graph, root)
            except StaysFloat as reason:
                calls[node.index] = str(reason)
    return calls


def _computes(node: Node) -> bool:
    return node.kind not in (Kind.INPUT, Kind.GUARD) and not reads_only_shape(node)


def recognise_steps(
    graph: Graph,
    root: nn.Module,
    recipe: Recipe,
    floats: Mapping[str, str],
    rules: int,
    calls: Calls | None = None,
) -> list[Step]:
    """One step per node; arguments as of `fuse`."""
    calls = recognised_calls(graph, root) if calls is None else calls
    steps = []
    for node in graph.nodes:
        if not _computes(node):
            steps.append(Step(ShapeOnly(), (node.index,), name=node.label))
            continue
        has_form, known = False, calls[node.index]
        try:
            if isinstance(known, str):
                raise StaysFloat(known)
            if not known.operator.anchor and node.label in floats:
                raise StaysFloat(floats[node.label])  # as without a kernel: sums that it reads stay float too
            has_form = True
            qconfig = _qconfig(node, known, graph, root, recipe, floats, rules)
            steps.append(Step(known.operator, (node.index,), known.inputs, node.label, qconfig))
        except StaysFloat as reason:
            operator = Float(str(reason), has_form, per_call=isinstance(reason, PerCall))
            steps.append(Step(operator, (node.index,), name=node.label))
    return steps


def _qconfig(
    node: Node, known: Recognised, graph: Graph, root: nn.Module, recipe: Recipe, floats: Mapping[str, str], rules: int
) -> QConfig | None:
    if not known.operator.anchor:
        return None
    name = node.target if node.kind is Kind.MODULE else node.owner
    if name in floats:
        raise StaysFloat(floats[name])
    qconfig, index = recipe.resolve(full_name(graph.path, name), attribute(root, name))
    if qconfig is None:
        raise StaysFloat("the recipe says so" if index >= 0 else "the recipe's default is float")
    if qconfig.per_call:
        raise PerCall(_per_call_reason(node, known, root))
    if qconfig.activation_bits == 16 and not (isinstance(known.operator, Weighted) and rules > 5):
        raise StaysFloat("activation_bits=16 has no static kernel")
    return qconfig


def _per_call_reason(node: Node, known: Recognised, root: nn.Module) -> str:
    if node.kind is not Kind.MODULE:
        return (
            f"{PER_CALL_REASON}, and a functional {known.operator.name} has no dynamic form, which modules alone have"
        )
    layer = type(attribute(root, node.target))
    if class_with_dynamic_form(layer) is None:
        return f"{PER_CALL_REASON}, and a {layer.__name__} has no dynamic form; without this setting it is static"
    return PER_CALL_REASON


def join_output_sequences(steps: list[Step], graph: Graph) -> list[Step]:
    """Let a recurrent layer's step give its output sequence, the first item of its result; states stay float."""
    first = {
        node.args[0].index: node.index
        for node in graph.nodes
        if node.target is operator.getitem and isinstance(node.args[0], Ref) and node.meta
        # An index may be a tensor, and comparing that with 0 gives no bool.
        and type(node.args[1]) is int and node.args[1] == 0
    }  # fmt: skip
    joined: set[int] = set()
    for step in steps:
        if isinstance(step.operator, Sequence) and step.output in first:
            step.nodes = (*step.nodes, first[step.output])
            joined.add(step.output)
    kept = [step for step in steps if len(step.nodes) > 1 or step.output not in joined]
    return sorted(kept, key=lambda step: step.output)
