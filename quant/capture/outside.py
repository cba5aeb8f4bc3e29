"""What forwards reach outside of their model: names and objects in globals, closures, defaults and classes.

Python tells nobody of a write there. So what the code of a forward names is looked up before it runs, and compared when
it has run: numbers, texts and tensors by their names, lists, dicts, sets, queues and plain objects by what they hold.
Functions of the same file that it names, and its own methods, are looked into too. What lies deeper is not found, and
neither is what lives in C: the second recording has to find that.
"""

from __future__ import annotations

import argparse
import collections
import contextvars
import dis
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quant.capture.state import same, same_content
from quant.capture.surroundings import GENERATORS, generator_key, generator_state, set_generator
from quant.names import full_name
from quant.objects import OPAQUE, attributes_of, fill

CONTAINERS = (list, dict, set, collections.deque, bytearray)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace, threading.local)
"""Classes of Python's own whose objects are there to be written to; its others (loggers, locks) are left alone."""
ASKS_CLASS = {"isinstance", "issubclass", "type", "__class__"}
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}
"""Attributes of a module that `watched.py` keeps; they are a dozen tables of hooks, and nearly always empty."""
DESCRIPTORS = (property, classmethod, staticmethod, types.MemberDescriptorType)
MOST_ITEMS, MOST_NUMBERS = 10_000, 65_536
"""Items of a container, and numbers of a tensor, that are compared and put back."""
FOREIGN = {*sys.stdlib_module_names, *sys.builtin_module_names, "torch", "numpy"}
_MISSING = object()


class Name:
    """What a name stands for in a namespace: globals, a class, a Python module, a function, or a closure's cell."""

    def __init__(self, space: Any, name: str) -> None:
        self.space, self.label = space, name
        self.key = (id(space), name)

    def state(self) -> Any:
        if isinstance(self.space, dict):
            return self.space.get(self.label, _MISSING)
        if isinstance(self.space, types.CellType):
            return self.space.cell_contents
        return vars(self.space).get(self.label, _MISSING)

    def put_back(self, state: Any) -> None:
        if isinstance(self.space, types.CellType):
            self.space.cell_contents = state
        elif state is _MISSING:
            self.space.pop(self.label, None) if isinstance(self.space, dict) else delattr(self.space, self.label)
        elif isinstance(self.space, dict):
            self.space[self.label] = state
        else:
            setattr(self.space, self.label, state)

    same = staticmethod(same)


class Content:
    """What a container or a plain object holds."""

    def __init__(self, value: Any, label: str) -> None:
        self.value, self.label = value, label
        self.key = (id(value), "")

    def state(self) -> Any:
        return attributes_of(self.value), _items(self.value)

    def put_back(self, state: Any) -> None:
        if isinstance(self.value, (set, bytearray)):
            self.value.clear()
            self.value.update(state[1]) if isinstance(self.value, set) else self.value.extend(state[1])
        else:
            fill(self.value, *state)

    same = staticmethod(same_content)


class Context:
    """The value of a context variable."""

    def __init__(self, variable: contextvars.ContextVar[Any], label: str) -> None:
        self.variable, self.label = variable, label
        self.key = (id(variable), "")

    def state(self) -> Any:
        return self.variable.get(_MISSING)

    def put_back(self, state: Any) -> None:
        if state is not _MISSING:
            self.variable.set(state)

    same = staticmethod(same)


class Values:
    """The numbers of a tensor that no module holds."""

    def __init__(self, tensor: Tensor, label: str) -> None:
        self.tensor, self.label = tensor, label
        self.key = (id(tensor), "")

    def state(self) -> Any:
        return self.tensor._version, self.tensor.detach().clone()

    def put_back(self, state: Any) -> None:
        with torch.no_grad():
            self.tensor.detach().copy_(state[1])

    @staticmethod
    def same(one: Any, other: Any) -> bool:
        return bool(one[0] == other[0])


class Drawn:
    """What a generator of random numbers draws from."""

    def __init__(self, generator: Any, label: str) -> None:
        self.generator, self.label = generator, label
        self.key = (id(generator), "")

    def state(self) -> Any:
        return generator_state(self.generator)

    def put_back(self, state: Any) -> None:
        set_generator(self.generator, state)

    @staticmethod
    def same(one: Any, other: Any) -> bool:
        return bool(generator_key(one) == generator_key(other))


Place = Drawn | Name | Content | Context | Values
States = dict[Any, tuple[Place, Any]]
"""By key of a place what it is, and what was there."""


class Outside:
    """The places that the forwards of one model reach.

    Attributes:
        first: of each place that was ever reached what was there then.
    """

    def __init__(self) -> None:
        self.first: States = {}
        self._frames: list[States] = []
        self._attributes: dict[Any, str] = {}

    def keep_attributes(self, model: nn.Module) -> None:
        """Put back what lists, dicts and objects on modules hold too, deeper than `watched` looks."""
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if name not in OF_EVERY_MODULE and not isinstance(value, (Tensor, *GENERATORS)):
                    for place in _contents(value, name):
                        self.first.setdefault(place.key, (place, place.state()))
                        self._attributes.setdefault(place.key, full_name(path, name))

    def enter(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """A module's forward begins."""
        frame: States = {}
        if not type(module).__module__.startswith("torch."):
            for place in _reached(module, forward):
                if place.key not in frame:
                    frame[place.key] = (place, place.state())
                    self.first.setdefault(place.key, frame[place.key])
        self._frames.append(frame)

    def leave(self) -> str:
        """The forward that began last has ended; gives the name of what it left changed, '' for nothing."""
        label = ""
        for key, (place, state) in self._frames.pop().items():
            if not _is_as(place, state):
                label = label or place.label
                for frame in self._frames:  # it is no change of its caller's
                    if key in frame:
                        frame[key] = (place, place.state())
        return label

    def reached(self) -> States:
        """What the forward that began last found."""
        return dict(self._frames[-1]) if self._frames else {}

    def snapshot(self) -> Callable[[], set[str]]:
        """What puts everything back to what it is now, also what is reached for the first time later.

        It gives the dotted names of the attributes of modules that had changed.
        """
        now = {key: (place, place.state()) for key, (place, _) in self.first.items()}

        def put_back() -> set[str]:
            changed = {key for key, (place, state) in {**self.first, **now}.items() if not _is_as(place, state)}
            for key in changed:
                place, state = now.get(key, self.first[key])
                place.put_back(state)
            return {self._attributes[key] for key in changed if key in self._attributes}

        return put_back


def alike(one: States, other: States) -> bool:
    """Whether two calls found the same."""
    return one.keys() == other.keys() and all(place.same(state, other[key][1]) for key, (place, state) in one.items())


def _is_as(place: Place, state: Any) -> bool:
    return bool(place.same(place.state(), state))


def looks_at_class(module: nn.Module, forward: Callable[..., Any], child: nn.Module) -> bool:
    """Whether a forward names a class of a child's, and something that asks for classes: an int8 layer has another."""
    function = _function_of(forward)
    if function is None:
        return False
    for one in (function, *_helpers(module, function)):
        names = _names(one.__code__)
        if names.isdisjoint(ASKS_CLASS) and not _matches_classes(one.__code__):
            continue
        classes = [one.__globals__.get(name, getattr(nn, name, None)) for name in names]
        if any(isinstance(kind, type) and kind is not nn.Module and isinstance(child, kind) for kind in classes):
            return True
    return False


def named_in(root: nn.Module, attributes: Collection[str]) -> str:
    """The first of some attributes that the code of a forward in a module names; '' where none does."""
    for module in root.modules() if attributes else ():
        for one in _own_functions(module, module.forward):
            texts = {constant for constant in one.__code__.co_consts if isinstance(constant, str)}  # of getattr
            asked = (_names(one.__code__) | texts).intersection(attributes)
            if asked:
                return min(asked)
    return ""


def _matches_classes(code: types.CodeType) -> bool:
    return any(instruction.opname == "MATCH_CLASS" for instruction in dis.get_instructions(code))


def _reached(module: nn.Module, forward: Callable[..., Any]) -> Iterator[Place]:
    for one in _own_functions(module, forward):
        names = _names(one.__code__)
        for name in names & one.__globals__.keys():
            yield from _named(one.__globals__, name, one.__globals__[name], names)
        for kind in _own_classes(type(module)):
            for name in names & vars(kind).keys():
                yield from _named(kind, name, vars(kind)[name], names)
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            with_value = _cell_value(cell)
            if with_value is not _MISSING:
                yield from _named(cell, name, with_value, names)
        for value in (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()):
            yield from _contents(value, "a default argument")


def _named(space: Any, name: str, value: Any, names: frozenset[str]) -> Iterator[Place]:
    """The places behind a name: what it stands for, and, where that can be written to, what is in it."""
    if isinstance(value, types.ModuleType):
        if value.__name__.partition(".")[0] not in FOREIGN:
            for inner in names & vars(value).keys():
                if not isinstance(vars(value)[inner], (types.ModuleType, type)):
                    yield from _named(value, inner, vars(value)[inner], names)
    elif isinstance(value, type):
        for kind in _own_classes(value):
            for inner in names & vars(kind).keys():
                if not isinstance(vars(kind)[inner], type):
                    yield from _named(kind, inner, vars(kind)[inner], names)
    elif isinstance(value, types.FunctionType):
        yield from (Name(value, inner) for inner in names & vars(value).keys())
    elif isinstance(value, contextvars.ContextVar):
        yield Context(value, name)
    elif not callable(value) and not isinstance(value, DESCRIPTORS):
        yield Name(space, name)
        yield from _contents(value, name)


def _contents(value: Any, name: str, depth: int = 0) -> Iterator[Place]:
    """The places in a value that can be written to, and in what it holds."""
    if isinstance(value, GENERATORS):
        yield Drawn(value, name)
    elif isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_inference() and value.numel() <= MOST_NUMBERS:
            yield Values(value, name)
    elif 0 < depth < 3 and isinstance(value, nn.Module):  # one that nobody registered
        yield Content(value, name)
        for part in vars(value).values():
            yield from _contents(part, name, depth + 1)
    elif _is_written_to(value):
        yield Content(value, name)
        if depth < 2:
            items = _items(value)
            inner = items.values() if isinstance(items, dict) else items or ()
            for part in (*attributes_of(value).values(), *inner):
                yield from _contents(part, name, depth + 1)


def _items(value: Any) -> Any:
    """What a container holds, whatever its class gives when it is asked: transformers' tables make new objects."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list):
        return list(list.__iter__(value))
    return list(value) if isinstance(value, CONTAINERS) else None


def _is_written_to(value: Any) -> bool:
    if isinstance(value, CONTAINERS):
        return len(value) <= MOST_ITEMS
    if isinstance(value, OPAQUE) or callable(value):
        return False
    own = isinstance(value, NAMESPACES) or type(value).__module__.partition(".")[0] not in FOREIGN
    return own and (hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))


def _own_functions(module: nn.Module, forward: Callable[..., Any]) -> list[types.FunctionType]:
    """A module's forward and its helpers, where they are the user's or a library's and no code of torch's."""
    function = _function_of(forward)
    if function is None or function.__module__.partition(".")[0] in FOREIGN:
        return []
    return [function, *_helpers(module, function)]


def _helpers(module: nn.Module, function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The functions of the same file that a function names, and the module's methods."""
    for name in _names(function.__code__):
        own = vars(module).get(name, inspect.getattr_static(type(module), name, None))
        for found in (function.__globals__.get(name), own):
            helper = _function_of(getattr(found, "fget", None) or getattr(found, "__func__", None) or found)
            if helper is not None and helper is not function and helper.__globals__ is function.__globals__:
                yield helper


def _function_of(value: Any) -> types.FunctionType | None:
    """The Python function in a method, a partial function or a wrapper."""
    try:
        value = inspect.unwrap(value)
    except (AttributeError, ValueError):
        return None
    value = getattr(value, "func", value)
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """The names that code and the functions in it look up."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _own_classes(kind: type) -> Iterator[type]:
    return (one for one in kind.__mro__ if one.__module__.partition(".")[0] not in FOREIGN)


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return _MISSING
