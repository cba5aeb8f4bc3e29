"""The arguments of a module's call: bound to names, copied, and compared with those of another call."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quant.runtime.matching import match_arguments
from quant.runtime.objects import OPAQUE, attributes_of, items_of, opened
from quant.runtime.trees import Ref, leaves, map_leaves, settle

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""

ONE_MEMORY = "writes to an argument whose memory is another argument's too"

_signature = functools.lru_cache(maxsize=256)(inspect.signature)
"""Without the cache it took 50 of the 2000 microseconds of a ResNet-18's call."""


def signature_of(module: nn.Module) -> inspect.Signature:
    """The signature of the forward of the module's class; `self` comes first.

    Raises:
        TypeError: forward is a property or a static method.
    """
    # torch.compile warns of functions with a cache, as getattr_static has from Python 3.13 on; and what it compiles was
    # captured before.
    if torch.compiler.is_compiling():
        return inspect.signature(type(module).forward)
    if isinstance(inspect.getattr_static(type(module), "forward"), staticmethod):
        raise TypeError(
            f"{type(module).__name__}: its forward is a static method, expected a method; declare forward(self, ...)"
        )
    if isinstance(type(module).forward, property):
        raise TypeError(
            f"{type(module).__name__}: its forward is a property, expected a method, whose arguments can be known; "
            "call what the property gives in a method forward(self, ...)"
        )
    return _signature(type(module).forward)


def parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    """The parameters of a module's forward that its callers know: without self, unless that is one of `*args`."""
    first, *others = signature_of(module).parameters.values()
    return [first, *others] if first.kind is first.VAR_POSITIONAL else others


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by the parameter names of the module's forward, with defaults filled in."""
    if not torch.compiler.is_compiling():
        arguments = _quickly(module, args, kwargs)
        if arguments is not None:
            return arguments
    bound = signature_of(module).bind(module, *args, **kwargs)
    bound.apply_defaults()
    [(own, first), *others] = bound.arguments.items()
    return dict(others) if first is module else {own: first[1:], **dict(others)}  # forward(*args), self among them


class _Parameters(NamedTuple):
    """The parameters of a forward, without self.

    Attributes:
        positional: names of those that may be given by position.
        defaults: by name, of all but the last two kinds; `inspect.Parameter.empty` where there is none.
        extra: the name of that which takes all other keywords; '' where there is none.
        own: the name of self.
    """

    positional: list[str]
    defaults: dict[str, Any]
    extra: str
    own: str


@functools.lru_cache(maxsize=256)
def _parameters(forward: Any) -> _Parameters | None:
    """None where the forward takes any number of positional arguments, or has positional-only ones."""
    named: list[inspect.Parameter] = []
    extra = ""
    own, *others = _signature(forward).parameters.values()
    for one in others:
        if one.kind in (one.VAR_POSITIONAL, one.POSITIONAL_ONLY):
            return None
        if one.kind is one.VAR_KEYWORD:
            extra = one.name
        else:
            named.append(one)
    positional = [one.name for one in named if one.kind is one.POSITIONAL_OR_KEYWORD]
    return _Parameters(positional, {one.name: one.default for one in named}, extra, own.name)


def places_of(forward: Any) -> tuple[list[str], dict[str, Any], int] | None:
    """The parameters' names, defaults and number without a default; None where one is keyword-only or variadic."""
    known = _parameters(forward)
    if known is None or known.extra or len(known.positional) < len(known.defaults):
        return None
    needed = sum(default is inspect.Parameter.empty for default in known.defaults.values())
    return known.positional, known.defaults, needed


def _quickly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """`bind` in a fifth of the time of `inspect`; None where `inspect` is needed, or would raise."""
    forward = type(module).forward
    known = None if isinstance(forward, property) else _parameters(forward)
    if known is None or len(args) > len(known.positional) or known.own in kwargs:
        return None
    arguments = {**known.defaults, **dict(zip(known.positional, args, strict=False))}
    by_position, extra = known.positional[: len(args)], {}
    for name, value in kwargs.items():
        if name in by_position or (name not in arguments and not known.extra):
            return None
        if name in arguments:
            arguments[name] = value
        else:
            extra[name] = value
    if any(value is inspect.Parameter.empty for value in arguments.values()):
        return None
    if known.extra:
        arguments[known.extra] = extra
    return arguments


def copied(tree: Any) -> Any:
    """Copy nested arguments with their tensors and objects, so that writes of a forward do not reach the caller's."""
    return rebuilt(tree, lambda leaf: clone(leaf) if type(leaf) is Tensor else leaf)


def copied_together(tree: Any) -> Any:
    """Copy as `copied` does; tensors that share memory, or are one tensor, do so in the copy too."""
    if not share_memory(tensors_in(tree)):
        return copied(tree)
    memories: dict[int, torch.UntypedStorage] = {}
    tensors: dict[int, Tensor] = {}

    def one(tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or id(tensor) in tensors:
            return tensors.get(id(tensor), tensor)
        copied_tensor = clone(tensor)
        if _has_memory(tensor):
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in memories:
                memories[memory.data_ptr()] = memory.clone()
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            copied_tensor.set_(memories[memory.data_ptr()], *place)
        tensors[id(tensor)] = copied_tensor
        return copied_tensor

    return rebuilt(tree, one)


def clone(tensor: Tensor) -> Tensor:
    """A detached copy of a tensor, with the attributes set on it."""
    result = tensor.detach().clone()
    if tensor.__dict__:
        result.__dict__.update(tensor.__dict__)
    return result


def kept(value: Any) -> Any:
    """A copy of an object; the object itself where it is immutable or cannot be copied."""
    if isinstance(value, OPAQUE) or not (attributes_of(value) or items_of(value) is not None or _is_iterator(value)):
        return value
    with contextlib.suppress(Exception):
        return copy.deepcopy(value)
    return value


def _is_iterator(value: Any) -> bool:
    """Whether reading an object changes it, as it does iterators."""
    return hasattr(value, "__next__")


def copyable(value: Any) -> bool:
    """Whether `copy.deepcopy` takes an object."""
    try:
        copy.deepcopy(value)
    except Exception:  # iterators, locks, handles
        return False
    return True


def rebuilt(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested arguments with `change` applied to each tensor, and with copies of all objects that can be changed."""

    def leaf(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) else kept(value)

    return settle(map_leaves(leaf, opened(tree, lambda value: isinstance(value, Tensor))), {})


def alike(module: nn.Module, first: Arguments, other: Arguments) -> bool:
    """Whether one graph may stand for both calls: tensors in the same places, and equal constants."""

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
    """The tensors in a call's arguments, in order, those inside objects included."""
    parts = leaves(opened(call, lambda leaf: isinstance(leaf, Tensor)))
    return [leaf for leaf in parts if isinstance(leaf, Tensor)]


def share_memory(tensors: list[Tensor]) -> bool:
    """Whether some of these tensors share memory, so that a write to one may show in another."""
    if len(tensors) < 2 or torch.compiler.is_compiling():
        return False
    plain = [one for one in tensors if _has_memory(one)]
    return len({one.untyped_storage().data_ptr() for one in plain}) < len(plain)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and tensor.numel() > 0
