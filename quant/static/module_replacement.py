"""Replacing norms that are folded into weights in a conversion, and removing tensors that are no longer read."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import nn

from quant.folding import norm_arguments, paths_behind
from quant.fusion.fused_graph import FusedGraph
from quant.graph import Kind
from quant.ops.operator import Weighted
from quant.runtime.keys import LayerKey
from quant.runtime.layers.weighted import FoldedNorm, StaticLayer
from quant.runtime.names import attribute, replace_modules, submodule
from quant.runtime.program_runner import ProgramRunner
from quant.static.assembly import Site
from quant.static.removed_tensors import remove_tensor
from quant.static.weights_to_restore import few_numbers, read_elsewhere


def remove_folded(
    fused: FusedGraph,
    root: nn.Module,
    layers: Mapping[LayerKey, nn.Module],
    sites: Mapping[int, Site],
    called: Container[nn.Module],
) -> None:
    """Replace batch norms that are folded into a weight by an Identity, so that names stay.

    Args:
        called: modules that are called elsewhere, as by an island, and stay norms.
    """
    folded: dict[nn.Module, nn.Module] = {}
    for step in fused.steps:
        place = step.operator.batch_norm if isinstance(step.operator, Weighted) else None
        node = None if place is None else fused.graph.nodes[place]
        if node is not None and node.kind is Kind.MODULE and attribute(root, node.target) not in called:
            layer = layers[sites[step.output].layer]
            assert isinstance(layer, StaticLayer)
            folded[attribute(root, node.target)] = FoldedNorm(layer)
    replace_modules(root, folded)


def remove_unread(
    fused: FusedGraph, root: nn.Module, model: nn.Module, programs: list[ProgramRunner], called: Container[nn.Module]
) -> set[str]:
    """Remove float parameters of functional layers that no float call reads; returns their names.

    Numbers per channel that are folded into a weight stay: they are few, and the user's forward may have to run. So do
    all parameters of a weight where that forward may read one of them that its layer's integers do not give back.

    Args:
        model: the model that the captured module `root` is in.
        called: modules that are called themselves, and so keep what they hold: a weight may be read beside its layer.
    """
    wanted = set().union(*(program.float_parameters() for program in programs))
    lost = {one.path for program in programs if program.weights for one in program.weights.tensors if one.undo is None}
    read = {path for path in lost if read_elsewhere(model, root, path)}
    gone, kept = set[str](), set[str]()
    for step in fused.steps:
        if isinstance(step.operator, Weighted) and fused.graph.nodes[step.nodes[0]].kind is not Kind.MODULE:
            layer = paths_behind(fused.graph, (step.operator.weight, step.operator.bias))
            stay = folded_parameters(step.operator, fused) | few_numbers(step, step.operator, fused, root)
            gone |= layer - wanted - stay
            kept |= set() if layer.isdisjoint(read) else layer
    own = {path for path in gone - kept if submodule(root, path.rpartition(".")[0]) not in called}
    return {path for path in sorted(own) if remove_tensor(root, path)}


def folded_parameters(operator: Weighted, fused: FusedGraph) -> set[str]:
    """Dotted names of the parameters that calls of functions brought into the weight of a step."""
    sources: list[object] = [one.constant for one in operator.affine]
    norm = None if operator.batch_norm is None else fused.graph.nodes[operator.batch_norm]
    if norm is not None and norm.kind is Kind.FUNCTION:
        sources += [value for name, value in norm_arguments(norm).items() if name != "input"]
    return paths_behind(fused.graph, sources)
