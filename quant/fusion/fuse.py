"""From a captured graph to a fused one: the passes in their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from quant.folding import ChannelShift
from quant.fusion.domains import choose_domains
from quant.fusion.float_values import gives_reals, wanted_as_reals
from quant.fusion.fused_graph import RULES, FusedGraph
from quant.fusion.infinite_values import layers_of_infinities
from quant.fusion.joined_steps import drop_identities, find_identities, fold_into_layers, join_lookups, read_ranks_early
from quant.fusion.recognised_steps import Calls, join_output_sequences, recognise_steps
from quant.fusion.slots import share_ranges
from quant.graph import Graph
from quant.ops.operator import Weighted
from quant.ops.step import Step
from quant.recipe import Recipe


def fuse(
    graph: Graph,
    root: nn.Module,
    recipe: Recipe,
    floats: Mapping[str, str] | None = None,
    rules: int = RULES,
    calls: Calls | None = None,
) -> FusedGraph:
    """Read a captured graph as steps.

    Args:
        root: the captured module.
        recipe: decides about weighted layers by their full names; the steps between them follow.
        floats: what stays float whatever the recipe says, and why: layers by their names within root, other steps by
            the step's name.
        rules: version of the rules to fuse by (`RULES`).
        calls: what `recognised_calls` says of the graph, where it is fused by several recipes.
    """
    floats = {**(floats or {}), **(layers_of_infinities(graph, root) if rules > 4 else {})}
    steps = join_output_sequences(recognise_steps(graph, root, recipe, floats, rules, calls), graph)
    read_ranks_early(steps, graph)
    users = graph.users()
    if rules > 3:
        find_identities(steps)
    if rules > 2:
        steps = drop_identities(steps, graph, root, users)
    steps = fold_into_layers(steps, graph, root, users)
    if rules > 2:
        steps = join_lookups(steps, graph, root, users)
    choose_domains(steps, graph, users, rules)
    fused = share_ranges(steps, graph, recipe, users, rules)
    fused.floats, fused.rules = floats, rules
    if rules > 2:
        fused.as_reals = frozenset(
            step.output for step in steps if gives_reals(step) and step.output in fused.slot_of
        ) & wanted_as_reals(steps, users)
        _correct_own_biases(steps)
    return fused


def fuse_again(
    fused: FusedGraph, root: nn.Module, recipe: Recipe, floats: Mapping[str, str], calls: Calls | None = None
) -> FusedGraph:
    """Fuse the same graph by the same rules, with more layers in float; `calls` as of `fuse`."""
    again = fuse(fused.graph, root, recipe, {**fused.floats, **floats}, fused.rules, calls)
    again.shared = fused.shared
    return again


def _correct_own_biases(steps: list[Step]) -> None:
    """Turn bias correction off for layers without a bias: a norm after them would amplify the bias that zeros get."""
    for step in steps:
        layer = step.operator
        if step.qconfig is None or not isinstance(layer, Weighted):
            continue
        shifted = layer.batch_norm is not None or any(isinstance(one, ChannelShift) for one in layer.affine)
        if layer.bias is None and not shifted:
            step.qconfig = replace(step.qconfig, bias_correction=False)
