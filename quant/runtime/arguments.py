"""The arguments of a module's call: by name, copied, and compared in kind with another call's."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quant.runtime.matching import match_arguments
from quant.runtime.objects import OPAQUE, attributes_of, items_of, opened
from quant.runtime.trees import Ref, leaves, map_leaves, settle

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""

ONE_MEMORY = "writes to an argument whose memory is another argument's too"

_signature = functools.lru_cache(maxsize=256)(inspect.signature)
"""Made anew at every call, it took 50 of a ResNet-18's 2000 microseconds."""


def signature_of(module: nn.Module) -> inspect.Signature:
    """Of the forward of the module's class, `self` first."""
    if isinstance(type(module).forward, property):
        raise TypeError(
            f"{type(module).__name__}: its forward is a property, expected a method, whose arguments can be known; "
            "call what the property gives in a method forward(self, ...)"
        )
    # torch.compile does not look through caches without a warning.
    take = inspect.signature if torch.compiler.is_compiling() else _signature
    return take(type(module).forward)


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments by the names that the module's class gives them, defaults filled in."""
    if not torch.compiler.is_compiling():
        found = _quickly(module, args, kwargs)
        if found is not None:
            return found
    bound = signature_of(module).bind(module, *args, **kwargs)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])


@functools.lru_cache(maxsize=256)
def places_of(forward: Any) -> tuple[list[str], dict[str, Any], int] | None:
    """The names of the arguments, the defaults, and how many have none; None where some have no one place and name."""
    parameters = list(_signature(forward).parameters.values())[1:]
    if any(one.kind is not one.POSITIONAL_OR_KEYWORD for one in parameters):
        return None
    defaults = {one.name: one.default for one in parameters}
    return list(defaults), defaults, sum(one.default is one.empty for one in parameters)


def _quickly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """What `inspect` would find, in a fifth of its time; None where that has to look, or has something to say."""
    forward = type(module).forward
    places = None if isinstance(forward, property) else places_of(forward)
    if places is None:
        return None
    names, defaults, needed = places
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    found = {**defaults, **given}
    clear = len(given) == len(args) + len(kwargs) and len(found) == len(names)
    return found if clear and all(name in given for name in names[:needed]) else None


def copied(tree: Any) -> Any:
    """Nested arguments with tensors and objects of their own: a forward that writes into them changes nobody's."""
    return rebuilt(tree, lambda leaf: clone(leaf) if type(leaf) is Tensor else leaf)


def copied_together(tree: Any) -> Any:
    """As `copied`, but tensors that lie over one memory, or are one tensor, are so in the copy too."""
    if not share_memory(tensors_in(tree)):
        return copied(tree)
    memories: dict[int, torch.UntypedStorage] = {}
    tensors: dict[int, Tensor] = {}

    def one(tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or id(tensor) in tensors:
            return tensors.get(id(tensor), tensor)
        found = clone(tensor)
        if _has_memory(tensor):
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in memories:
                memories[memory.data_ptr()] = memory.clone()
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            found.set_(memories[memory.data_ptr()], *place)
        tensors[id(tensor)] = found
        return found

    return rebuilt(tree, one)


def clone(tensor: Tensor) -> Tensor:
    """A tensor of the same values, with the attributes that somebody set on it."""
    found = tensor.detach().clone()
    if tensor.__dict__:
        found.__dict__.update(tensor.__dict__)
    return found


def kept(value: Any) -> Any:
    """An object as it is now, whatever is done to it: a copy, or itself where it cannot be copied or changed."""
    if isinstance(value, OPAQUE) or not (attributes_of(value) or items_of(value) is not None or _is_iterator(value)):
        return value
    with contextlib.suppress(Exception):
        return copy.deepcopy(value)
    return value


def _is_iterator(value: Any) -> bool:
    """Whether a call changes an object by reading it, which only its class's C code knows how."""
    return hasattr(value, "__next__")


def copyable(value: Any) -> bool:
    """Whether an object can be copied."""
    try:
        copy.deepcopy(value)
    except Exception:  # iterators, locks, handles
        return False
    return True


def rebuilt(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested arguments with other tensors, and copies of the objects that hold them or that may be written to."""

    def leaf(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) else kept(value)

    return settle(map_leaves(leaf, opened(tree, lambda value: isinstance(value, Tensor))), {})


def alike(module: nn.Module, first: Arguments, other: Arguments) -> bool:
    """Whether one graph can serve both calls: tensors where tensors were, and the same constants."""

    def tensor_or_raise(_: int, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise ValueError("no tensor")

    arguments = opened(bind(module, *first), lambda leaf: isinstance(leaf, Tensor))
    expected = map_leaves(lambda leaf: Ref(0) if isinstance(leaf, Tensor) else leaf, arguments)
    try:
        match_arguments(expected, bind(module, *other), "", tensor_or_raise)
    except Exception:
        return False
    return True


def tensors_in(call: Any) -> list[Tensor]:
    """The tensors of a call, also of those in objects, in order."""
    found = leaves(opened(call, lambda leaf: isinstance(leaf, Tensor)))
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def share_memory(tensors: list[Tensor]) -> bool:
    """Whether what is written to one of these tensors may be seen in another."""
    if len(tensors) < 2 or torch.compiler.is_compiling():
        return False
    plain = [one for one in tensors if _has_memory(one)]
    return len({one.untyped_storage().data_ptr() for one in plain}) < len(plain)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and tensor.numel() > 0
