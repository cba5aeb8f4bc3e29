"""The state that forwards keep on a model: the attributes that they change, with their values before any data."""

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
"""Dotted name in the model -> value; a submodule is not copied, since it contains observers."""


class Absent(enum.Enum):
    """The value of an attribute that a forward is the first to set."""

    ABSENT = "absent"


def note(state: State, module: nn.Module, path: str, names: Iterable[str]) -> None:
    """Add the present values of attributes that a forward changes, unless they are known.

    Args:
        state: the values are added here.
        module, path: the module, and its dotted name in the model.
        names: the attributes, by their names within the module.
    """
    for name in sorted(names):
        full = full_name(path, name)
        if full not in state:
            owner, _, attribute = name.rpartition(".")
            holder = module.get_submodule(owner)
            value = getattr(holder, attribute, Absent.ABSENT)
            state[full] = value if isinstance(value, (Absent, nn.Module)) else copy_value(value)


def put_back(state: Mapping[str, Any], model: nn.Module) -> None:
    """Restore the state of a model, replaced submodules first."""
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
    """Restore submodules that forwards remove or add within the context.

    Programs of further calls stay: they are under the reserved name, or inside modules that stay.
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
    """Attributes of islands that may hold state: objects that their forward may change without setting an attribute.

    Args:
        module, path: a module, and its dotted name in the model.
        islands: by dotted name in the model; those outside of the module are ignored.

    Returns:
        the attributes' names within the module.
    """
    for island in islands:
        if path and island != path and not island.startswith(f"{path}."):
            continue
        inner = island.removeprefix(path).removeprefix(".")
        for name, value in vars(module.get_submodule(inner)).items():
            own = not name.startswith("_") and not isinstance(value, (Tensor, nn.Module, str, int, float, type(None)))
            if own and not callable(value) and copyable(value):
                yield full_name(inner, name)
