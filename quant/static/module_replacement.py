"""What a conversion replaces: the new module under every name of the old one, and nothing kept that is read no more."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from quant.folding import norm_arguments
from quant.fusion.fused_graph import FusedGraph
from quant.graph import Kind
from quant.ops.operator import Weighted
from quant.runtime.names import attribute, child_of, full_name
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.trees import Attr, Ref, leaves
from quant.static.assembly import Site
from quant.static.layers import FoldedNorm, StaticLayer


def replace_module(root: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put `new` where root has `old`, under every name; returns the root, which may be what was replaced."""
    if root is old:
        return new
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
    return root


def remove_folded(
    fused: FusedGraph, root: nn.Module, layers: Mapping[str, nn.Module], sites: Mapping[int, Site]
) -> None:
    """Put an Identity where a batch norm was that is part of a weight now, so that the names stay."""
    for step in fused.steps:
        place = step.operator.batch_norm if isinstance(step.operator, Weighted) else None
        node = None if place is None else fused.graph.nodes[place]
        if node is not None and node.kind is Kind.MODULE:
            layer = layers[sites[step.output].layer]
            assert isinstance(layer, StaticLayer)
            replace_module(root, attribute(root, node.target), FoldedNorm(layer))


def remove_unread(fused: FusedGraph, root: nn.Module, programs: list[ProgramRunner]) -> None:
    """Take away the float parameters of functional layers where nothing in float reads them.

    Numbers per channel that are folded into a weight stay: they are few, and the user's forward may have to run.
    """
    wanted = set().union(*(program.float_parameters() for program in programs))
    for step in fused.steps:
        if not isinstance(step.operator, Weighted):
            continue
        functional = fused.graph.nodes[step.nodes[0]].kind is not Kind.MODULE
        layer = _paths((step.operator.weight, step.operator.bias), fused) if functional else set()
        for path in layer - wanted - folded_parameters(step.operator, fused):
            owner, _, name = path.rpartition(".")
            module = root.get_submodule(owner)
            for store in (module._parameters, module._buffers):
                if name in store:
                    store[name] = nn.Parameter(torch.empty(0), requires_grad=False) if _saves_itself(module) else None


def _saves_itself(module: nn.Module) -> bool:
    """Whether a class has a state_dict or a copy of its own making, which may read a tensor that is gone."""
    kind = type(module)
    return kind._save_to_state_dict is not nn.Module._save_to_state_dict or hasattr(kind, "__deepcopy__")


def folded_parameters(operator: Weighted, fused: FusedGraph) -> set[str]:
    """Dotted names of the parameters that calls of functions brought into the weight of a step."""
    found: list[object] = [one.constant for one in operator.affine]
    norm = None if operator.batch_norm is None else fused.graph.nodes[operator.batch_norm]
    if norm is not None and norm.kind is Kind.FUNCTION:
        found += [value for name, value in norm_arguments(norm).items() if name != "input"]
    return _paths(found, fused)


def remove_parametrizations(root: nn.Module) -> list[str]:
    """Make ordinary modules again of those whose weight was computed at every call, where nothing of that is left.

    A parametrized class computes its weight for whoever reads the attribute, and refuses to be pickled.

    Returns:
        the names of what held the weight's parts.
    """
    gone = []
    for name, module in root.named_modules():
        lists = child_of(module, "parametrizations")
        if not isinstance(lists, nn.ModuleDict) or [*lists.parameters(), *lists.buffers()]:
            continue
        del module._modules["parametrizations"]
        module.__class__ = type(module).__base__
        for tensor, _ in lists.named_children():
            module.register_parameter(tensor, None)
            gone.append(full_name(name, f"parametrizations.{tensor}"))
    return gone


def _paths(tree: object, fused: FusedGraph) -> set[str]:
    """The parameters that a weight is, or is computed from."""
    found: set[str] = set()
    for leaf in leaves(tree):
        if isinstance(leaf, Attr):
            found.add(leaf.path)
        elif isinstance(leaf, Ref):
            node = fused.graph.nodes[leaf.index]
            found |= _paths((node.args, node.kwargs), fused)
    return found
