"""What a forward leaves on a model: the attributes that it changes, as they were before any data."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.copying import copy_value
from quant.runtime.arguments import copyable
from quant.runtime.names import full_name, set_attribute
from quant.runtime.programs import RESERVED

State = dict[str, Any]
"""Values by dotted name within the model; a submodule is itself, as observers are in it."""


class Absent(enum.Enum):
    """The value of an attribute that a forward is the first to set."""

    ABSENT = "absent"


def note(state: State, module: nn.Module, path: str, names: Iterable[str]) -> None:
    """Add what a forward changes of a module, as it is now, where it is not known yet.

    Args:
        path: dotted name of the module in the model.
        names: within the module.
    """
    for name in sorted(names):
        full = full_name(path, name)
        if full not in state:
            owner, _, attribute = name.rpartition(".")
            holder = module.get_submodule(owner)
            value = getattr(holder, attribute, Absent.ABSENT)
            state[full] = value if isinstance(value, (Absent, nn.Module)) else copy_value(value)


def put_back(state: Mapping[str, Any], model: nn.Module) -> None:
    """Let a model have the state that was noted; a submodule that was put in place of another one goes first."""
    for path, value in sorted(state.items(), key=lambda one: not isinstance(one[1], nn.Module)):
        owner, _, name = path.rpartition(".")
        holder = model.get_submodule(owner)
        if isinstance(value, nn.Module):
            holder._modules[name] = value
        elif value is not Absent.ABSENT:
            set_attribute(holder, name, copy_value(value))
        elif any(name in store for store in (vars(holder), holder._buffers, holder._parameters, holder._modules)):
            delattr(holder, name)


@contextlib.contextmanager
def keeping_children(model: nn.Module) -> Iterator[None]:
    """Put back the modules that forwards take out of a model or put into it: a fresh model has not got so far.

    What calls of another structure add stays: it is under the reserved name, and in what is there already.
    """
    modules = [
        module
        for name, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule) and RESERVED not in name.split(".")
    ]
    before = [(module, dict(module._modules)) for module in modules]
    yield
    for module, children in before:
        added = {name: child for name, child in module._modules.items() if name == RESERVED}
        if {**children, **added} != module._modules:
            module._modules.clear()
            module._modules.update({**children, **added})


def kept_by_islands(module: nn.Module, path: str, islands: Iterable[str]) -> Iterator[str]:
    """Attributes of islands that may hold state: objects that their forward may change without setting anything.

    Args:
        path: dotted name of the module in the model.
        islands: by dotted name in the model; those outside of the module are left out.

    Returns:
        names within the module.
    """
    for island in islands:
        if path and island != path and not island.startswith(f"{path}."):
            continue
        inner = island.removeprefix(path).removeprefix(".")
        for name, value in vars(module.get_submodule(inner)).items():
            own = not name.startswith("_") and not isinstance(value, (Tensor, nn.Module, str, int, float, type(None)))
            if own and not callable(value) and copyable(value):
                yield full_name(inner, name)
