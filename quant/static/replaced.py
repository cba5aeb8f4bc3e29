"""What a conversion replaces: the new module under every name of the old one, and nothing kept that is read no more."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from quant.fuse import Plan
from quant.graph import Attr, Ref, attribute, leaves
from quant.names import full_name
from quant.static.program import ProgramRunner
from quant.static.recognise import OPERATORS


def replace_module(root: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put `new` where root has `old`, under every name; returns the root, which may be what was replaced."""
    if root is old:
        return new
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
    return root


def remove_folded(plan: Plan, root: nn.Module) -> None:
    """Put an Identity where a batch norm was that is part of a weight now, so that the names stay."""
    for step in plan.steps:
        if step.integer and "batch_norm" in step.attrs:
            replace_module(root, attribute(root, plan.graph.nodes[step.attrs["batch_norm"]].target), nn.Identity())


def remove_unread(plan: Plan, root: nn.Module, program: ProgramRunner) -> None:
    """Take away the float parameters of functional layers, where nothing in float still reads them."""
    wanted = program.float_parameters()
    for step in plan.steps:
        if not (step.integer and OPERATORS[step.op].weighted) or plan.graph.nodes[step.nodes[0]].kind == "module":
            continue
        for path in _paths((step.attrs["weight"], step.attrs["bias"]), plan) - wanted:
            owner, _, name = path.rpartition(".")
            module = root.get_submodule(owner)
            for store in (module._parameters, module._buffers):
                if name in store:
                    store[name] = nn.Parameter(torch.empty(0), requires_grad=False) if _saves_itself(module) else None


def _saves_itself(module: nn.Module) -> bool:
    """Whether a class has a state_dict or a copy of its own making, which may read a tensor that is gone."""
    kind = type(module)
    return kind._save_to_state_dict is not nn.Module._save_to_state_dict or hasattr(kind, "__deepcopy__")


def remove_parametrizations(root: nn.Module) -> list[str]:
    """Make ordinary modules again of those whose weight was computed at every call, where nothing of that is left.

    A parametrized class computes its weight for whoever reads the attribute, and refuses to be pickled.

    Returns:
        the names of what held the weight's parts.
    """
    gone = []
    for name, module in root.named_modules():
        lists = module._modules.get("parametrizations")
        if not is_parametrized(module) or lists is None or [*lists.parameters(), *lists.buffers()]:
            continue
        del module._modules["parametrizations"]
        module.__class__ = type(module).__base__
        for tensor, _ in lists.named_children():
            module.register_parameter(tensor, None)
            gone.append(full_name(name, f"parametrizations.{tensor}"))
    return gone


def _paths(tree: object, plan: Plan) -> set[str]:
    """The parameters that a weight is, or is computed from."""
    found: set[str] = set()
    for leaf in leaves(tree):
        if isinstance(leaf, Attr):
            found.add(leaf.path)
        elif isinstance(leaf, Ref):
            node = plan.graph.nodes[leaf.index]
            found |= _paths((node.args, node.kwargs), plan)
    return found
