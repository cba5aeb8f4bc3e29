"""Dotted names of modules and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def full_name(*parts: str) -> str:
    """Join dotted names, outermost first; '' stands for the root and is left out."""
    return ".".join(filter(None, parts))


def child_name(name: str) -> str:
    """A dotted name as that of one child of a module, which has no dots."""
    return name.replace(".", "/")


def child_of(module: nn.Module, name: str) -> nn.Module | None:
    """The child of this name, or None; a ScriptModule keeps its children in a class without `get`."""
    children = module._modules
    return children[name] if name in children else None  # noqa: SIM401


def submodule(root: nn.Module, path: str) -> nn.Module:
    """`root.get_submodule(path)`, in a fifth of its time; '' is root itself.

    Raises:
        AttributeError: there is no such submodule.
    """
    module = root
    for part in path.split(".") if path else ():
        child = child_of(module, part)
        if child is None:
            return root.get_submodule(path)
        module = child
    return module


def put_module(root: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Put a module in place of the one with this dotted name; returns the root, or the module where that is the root.

    A user's `__setattr__` is not called.

    Raises:
        AttributeError: there is no module to hold it.
    """
    if not path:
        return module
    owner, _, name = path.rpartition(".")
    set_attribute(submodule(root, owner), name, module)
    return root


def replace_modules(root: nn.Module, others: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put other modules in place of those of a root, under every name; returns the root, or what is in its place."""
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in others:
                parent._modules[name] = others[child]
    return others.get(root, root)


def has_submodule(root: nn.Module, path: str) -> bool:
    """Whether `root` has a submodule with this dotted name."""
    try:
        submodule(root, path)
    except AttributeError:
        return False
    return True


def attribute(root: nn.Module, path: str) -> Any:
    """The parameter, buffer or submodule of `root` with this dotted name ('' is root itself)."""
    value: Any = root
    for part in path.split(".") if path else ():
        value = getattr(value, part)
    return value


def tensor_reader(root: nn.Module, path: str) -> Callable[[], Any]:
    """A function that returns `attribute(root, path)`, of a parameter or buffer in a tenth of its time."""
    owner, _, name = path.rpartition(".")

    def read() -> Any:
        module = submodule(root, owner)
        for store in (module._parameters, module._buffers):
            if name in store and store[name] is not None:
                return store[name]
        return attribute(root, path)

    return read


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set a module's attribute without the user's `__setattr__`, which has run already when the forward wrote it."""
    if isinstance(module, torch.jit.ScriptModule):
        setattr(module, name, value)
    else:
        nn.Module.__setattr__(module, name, value)


def has_attribute(module: nn.Module, name: str) -> bool:
    """Whether a module or its class has an attribute; a `__getattr__` of the user's is not called."""
    stores = (module._parameters, module._buffers, module._modules)
    return name in vars(module) or hasattr(type(module), name) or any(name in store for store in stores)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype without the name of torch."""
    return str(dtype).removeprefix("torch.")
