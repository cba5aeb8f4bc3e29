"""Transfers the methods and attributes of a user's subclass of a torch layer to its int8 module.

The int8 module's class becomes a subclass of the int8 class with the user's members, except names that the int8 class
defines. It is created when needed, once for each pair of classes, and pickled as that pair. `super()` in such a method
does not reach the float layer.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from quant.recurrent_layers import is_recurrent_class


def inherit(new: nn.Module, old: nn.Module) -> None:
    """Give `new` the plain attributes of `old` and the members of its class, where it has none of that name itself."""
    held = {*new.__dict__, *new._buffers, *new._parameters, *new._modules}
    for key, value in old.__dict__.items():
        if not key.startswith("_") and key not in held and not hasattr(type(new), key):
            new.__dict__[key] = value
    inherit_methods(new, type(old))


def inherit_methods(new: nn.Module, kind: type[nn.Module]) -> None:
    """Give `new` the members of a subclass of a torch layer that neither its class nor itself has."""
    held = {*new.__dict__, *new._buffers, *new._parameters, *new._modules}
    names = tuple(sorted(name for name in _members(kind) if name not in held and not hasattr(type(new), name)))
    if names:
        classes: tuple[Any, Any] = type(new), kind
        new.__class__ = _joined(*classes, names)


def _members(kind: type[nn.Module]) -> dict[str, Any]:
    """What the user's classes above the one that is replaced define, the lowest first."""
    members: dict[str, Any] = {}
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] == "torch" or one is object or is_recurrent_class(one):
            break
        for name, value in vars(one).items():
            if not (name.startswith("__") and name.endswith("__")) and name != "_abc_impl":
                members.setdefault(name, value)
    return members


@functools.cache
def _joined(int8: Any, kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    members = _members(kind)

    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _empty, (int8, kind, names), state

    # The int8 class's own name: TorchScript finds overloads by it, and files name the class that they hold.
    own: dict[str, Any] = {name: getattr(int8, name) for name in ("__module__", "__qualname__", "__doc__")}
    properties = [name for name in names if isinstance(members[name], property)]
    own["__jit_unused_properties__"] = [*getattr(int8, "__jit_unused_properties__", []), *properties]
    return type(int8.__name__, (int8,), {**{name: members[name] for name in names}, **own, "__reduce_ex__": reduce})


def _empty(int8: Any, kind: Any, names: tuple[str, ...]) -> nn.Module:
    """A stand-in whose state is still to come, for pickle."""
    joined = _joined(int8, kind, names)
    return joined.__new__(joined)
