"""The callee of a float call: a function, a method of its first argument, or a module."""

from __future__ import annotations

import builtins
import functools
import importlib
import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from quant.runtime.names import submodule


@dataclass(frozen=True)
class Function:
    """A function, known by its module and name; two with the same place are equal.

    Attributes:
        module: the dotted name of its module.
        name: its name in the module; dotted where it is an attribute of a class.
        target: the function itself.
    """

    module: str
    name: str
    target: Callable[..., Any] = field(compare=False, repr=False)

    def call(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Its value."""
        return self.target(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Some functions of torch.nn.functional (max_pool2d) are defined inside another function, which pickle refuses.
        importable = named(sys.modules.get(self.module), self.name) is self.target
        return {**self.__dict__, "target": None} if importable else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        target = state["target"]
        if target is None:
            target = named(importlib.import_module(state["module"]), state["name"])
        self.__dict__.update({**state, "target": target})


@dataclass(frozen=True)
class Method:
    """A method of the first argument, by its name."""

    name: str

    def call(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Its value."""
        return getattr(args[0], self.name)(*args[1:], **kwargs)


@dataclass(frozen=True)
class Submodule:
    """A float module, by its dotted name; the module that has this name at the time of the call is called."""

    path: str

    def call(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Its value; for the root, the value of its class's forward, since its own forward runs the program."""
        if self.path:
            return submodule(root, self.path)(*args, **kwargs)
        return type(root).forward(root, *args, **kwargs)


Callee: TypeAlias = Function | Method | Submodule


SPACES: tuple[ModuleType, ...] = (torch, F, operator, builtins, math, torch.special, torch.linalg, torch.fft)
"""Modules searched first: many of torch's functions have no `__module__`, or another one."""


def function(target: Callable[..., Any]) -> Function:
    """A function with its module and name; a lambda has those of its `__module__` and `__qualname__`."""
    name = getattr(target, "__name__", "") or type(target).__name__
    for space in SPACES:
        if getattr(space, name, None) is target:
            return Function(space.__name__, name, target)
    for method, member in vars(torch.Tensor).items():  # operators that torch wraps, such as `**`
        if member is target:
            return Function(torch.__name__, f"Tensor.{method}", target)
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        namespace, _, operation = str(target).partition(".")
        return Function(f"{torch.ops.__name__}.{namespace}", operation, target)
    return Function(getattr(target, "__module__", "") or "", getattr(target, "__qualname__", name), target)


def named(module: ModuleType | None, name: str) -> Any:
    """The attribute with a dotted name in a module; None where there is none."""
    return functools.reduce(lambda outer, part: getattr(outer, part, None), name.split("."), module)
