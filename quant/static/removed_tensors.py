"""What a converted module keeps no more: float parameters that nothing reads, and what computed weights of them."""

from __future__ import annotations

import torch
from torch import nn

from quant.runtime.names import child_of, full_name


def remove_tensor(root: nn.Module, path: str) -> bool:
    """Take away a parameter or buffer, by its dotted name; returns whether there was one.

    Its name stays, with None or, in a class that reads its own tensors, with an empty parameter.
    """
    owner, _, name = path.rpartition(".")
    module = root.get_submodule(owner)
    for store in (module._parameters, module._buffers):
        if name in store:
            store[name] = nn.Parameter(torch.empty(0), requires_grad=False) if _saves_itself(module) else None
            return True
    return False


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
        lists = child_of(module, "parametrizations")
        if not isinstance(lists, nn.ModuleDict) or [*lists.parameters(), *lists.buffers()]:
            continue
        del module._modules["parametrizations"]
        module.__class__ = type(module).__base__
        for tensor, _ in lists.named_children():
            module.register_parameter(tensor, None)
            gone.append(full_name(name, f"parametrizations.{tensor}"))
    return gone
