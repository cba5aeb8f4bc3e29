"""Rebinding of functions that refer to parts of a model, for its copy: deep copies share functions.

`model.forward = lambda x: last(first(x))`, or a wrapper around an earlier forward, would compute with the layers of the
original model, and train them.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
HOOKS = "_hooks"


def rebind(copied: nn.Module, copies: dict[int, Any]) -> None:
    """Let functions that are set on a copy's modules, as forwards or hooks, refer to the copies.

    Args:
        copies: the copies by the `id` of the originals: the memo of `copy.deepcopy`.
    """
    rebinder = Rebinder(copies)
    for module in copied.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, FUNCTIONS):
                module.__dict__[name] = rebinder.of(value)
            elif name.endswith(HOOKS) and isinstance(value, dict):  # torch.fx keeps a list of its own
                for key, hook in value.items():
                    value[key] = rebinder.of(hook)


class Rebinder:
    """Gives functions, lists, tuples and dictionaries that refer to copies where the given ones refer to originals.

    Args:
        copies: by the `id` of the originals.
    """

    def __init__(self, copies: dict[int, Any]) -> None:
        self.copies = copies
        self.functions: dict[int, Any] = {}
        self._inside: set[int] = set()

    def of(self, value: Any) -> Any:
        """The value with copies in place of originals; `value` itself where it refers to no original."""
        if id(value) in self.copies and not isinstance(value, (types.FunctionType, type)):
            return self.copies[id(value)]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            function, owner = self.of(value.__func__), self.of(value.__self__)
            same = function is value.__func__ and owner is value.__self__
            return value if same else types.MethodType(function, owner)
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            func, args, keywords = new = tuple(map(self.of, parts))
            return value if _all_same(new, parts) else type(value)(func, *args, **keywords)
        if type(value) in (list, tuple, dict) and id(value) not in self._inside:
            return self._container(value)
        return value

    def _container(self, value: Any) -> Any:
        self._inside.add(id(value))  # a value that contains itself is left as it is
        try:
            if isinstance(value, dict):
                values = {key: self.of(item) for key, item in value.items()}
                return value if _all_same(values.values(), value.values()) else values
            items = [self.of(item) for item in value]
            return value if _all_same(items, value) else type(value)(items)
        finally:
            self._inside.discard(id(value))

    def _function(self, function: types.FunctionType) -> Any:
        if id(function) in self.functions:
            return self.functions[id(function)]
        self.functions[id(function)] = function  # a recursive function refers to itself
        held = [_content(cell) for cell in function.__closure__ or ()]
        parts = (held, function.__defaults__, function.__kwdefaults__, dict(vars(function)))
        cells, defaults, named, attributes = new = tuple(map(self.of, parts))
        if _all_same(new, parts):
            return function
        closure = tuple(
            cell if value is content else types.CellType(value)
            for cell, content, value in zip(function.__closure__ or (), held, cells, strict=True)
        )
        rebound = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure)
        rebound.__kwdefaults__ = named
        rebound.__qualname__, rebound.__module__ = function.__qualname__, function.__module__
        vars(rebound).update(attributes)
        self.functions[id(function)] = rebound
        return rebound


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return cell


def _all_same(one: Any, other: Any) -> bool:
    return all(a is b for a, b in zip(one, other, strict=True))
