"""Dotted names of modules and steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def full_name(*parts: str) -> str:
    """The name of a part of the model by the names of what it is in, outermost first; '' is the root of each."""
    return ".".join(filter(None, parts))


def child_name(name: str) -> str:
    """A dotted name as that of one child of a module, which has no dots."""
    return name.replace(".", "/")


def child_of(module: nn.Module, name: str) -> nn.Module | None:
    """The submodule of this name, or None; in a ScriptModule they lie in no ordinary dict."""
    children = module._modules  # which has no get() there
    return children[name] if name in children else None  # noqa: SIM401


def submodule(root: nn.Module, path: str) -> nn.Module:
    """`root.get_submodule(path)`, in a fifth of its time; '' is root itself.

    Raises:
        AttributeError: there is none.
    """
    found: nn.Module | None = root
    for part in path.split(".") if path else ():
        found = None if found is None else child_of(found, part)
    return root.get_submodule(path) if found is None else found


def has_submodule(root: nn.Module, path: str) -> bool:
    """Whether there is such a one."""
    try:
        submodule(root, path)
    except AttributeError:
        return False
    return True


def attribute(root: nn.Module, path: str) -> Any:
    """The parameter, buffer or submodule of `root` with this dotted name ('' is root itself)."""
    found: Any = root
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Let a module have an attribute, as it is: a `__setattr__` of the user's has had its say when the forward ran."""
    if isinstance(module, torch.jit.ScriptModule):
        setattr(module, name, value)
    else:
        nn.Module.__setattr__(module, name, value)


def has_attribute(module: nn.Module, name: str) -> bool:
    """Whether a module or its class has an attribute, without asking a `__getattr__` of the user's."""
    stores = (module._parameters, module._buffers, module._modules)
    return name in vars(module) or hasattr(type(module), name) or any(name in store for store in stores)
