"""Layers that several captured modules call: what a layer has only once must fit all of them.

An int8 Linear or convolution has input and output ranges per call, so it can be shared. It has one bias, which is not
corrected by the mean of one call; training would learn two scales for its weight, which is refused; and a recurrent
layer has one range for its input and states, so it becomes dynamic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from quant.fusion.fused_graph import FusedGraph
from quant.graph import Kind
from quant.observers import LEARNED
from quant.ops.operator import Weighted
from quant.ops.step import Step, is_recurrent
from quant.recipe import RecipeError
from quant.runtime.names import attribute, full_name

Calls = dict[str, dict[str, list[str]]]
"""The full names of the same layer in other units, by unit and layer."""


def shared_layers(
    graphs: Mapping[str, FusedGraph], roots: Mapping[str, nn.Module], which: Callable[[Step], bool]
) -> Calls:
    """The modules of integer steps that other units call too.

    Args:
        graphs: by unit. roots: the captured modules.
        which: selects among the integer steps.
    """
    names: dict[int, dict[str, str]] = {}
    for path, fused in graphs.items():
        for step in fused.steps:
            node = fused.graph.nodes[step.nodes[0]]
            if step.integer and node.kind is Kind.MODULE and which(step):
                names.setdefault(id(attribute(roots[path], node.target)), {})[path] = node.target
    shared: Calls = {path: {} for path in graphs}
    for same in names.values():
        for path, name in same.items():
            others = [full_name(*other) for other in same.items() if other[0] != path]
            if others:
                shared[path][name] = others
    return shared


def one_range_each(graphs: Mapping[str, FusedGraph], roots: Mapping[str, nn.Module]) -> dict[str, dict[str, str]]:
    """The recurrent layers that cannot be static, by unit, and why."""
    shared = shared_layers(graphs, roots, is_recurrent)
    return {
        path: {name: _why(path, name, others) for name, others in one.items()} for path, one in shared.items() if one
    }


def _why(path: str, name: str, others: list[str]) -> str:
    same = " and ".join(sorted([full_name(path, name), *others]))
    return f"{same} are one layer, captured apart, with ranges of their own"


def note_shared(graphs: Mapping[str, FusedGraph], roots: Mapping[str, nn.Module]) -> None:
    """Set `FusedGraph.shared` to the weighted layers that other units call too.

    Raises:
        RecipeError: one of them would learn its weight's scale in each unit.
    """
    learning = shared_layers(graphs, roots, _learns)
    for path, layers in learning.items():
        for name, others in layers.items():
            raise RecipeError(
                f"layer '{full_name(path, name)}' is {' and '.join(map(repr, others))} too, captured apart, so that "
                "training would learn two scales for one weight; give it a weight_observer that follows the weight "
                "('minmax')"
            )
    for path, layers in shared_layers(graphs, roots, lambda step: isinstance(step.operator, Weighted)).items():
        graphs[path].shared = frozenset(layers)


def add_shared(
    known: Mapping[str, FusedGraph], new: Mapping[str, FusedGraph], roots: Mapping[str, nn.Module]
) -> dict[str, str]:
    """Set `FusedGraph.shared` where new units call layers that other units call too.

    Returns:
        the new units that cannot be, by path, and why: they call a layer that can have its integers in one unit alone.
    """
    graphs = {**known, **new}
    reasons = {
        path: next(iter(layers.values())) for path, layers in one_range_each(graphs, roots).items() if path in new
    }
    for path, layers in shared_layers(graphs, roots, _learns).items():
        if path in new and layers:
            reasons.setdefault(path, f"{next(iter(layers))} learns the scale of its weight in another captured module")
    graphs = {path: fused for path, fused in graphs.items() if path not in reasons}
    for path, layers in shared_layers(graphs, roots, lambda step: isinstance(step.operator, Weighted)).items():
        graphs[path].shared = frozenset({*graphs[path].shared, *layers})
    return reasons


def _learns(step: Step) -> bool:
    return isinstance(step.operator, Weighted) and step.qconfig is not None and step.qconfig.weight_observer in LEARNED
