"""What forwards reach outside of their model: names and objects in globals, closures, defaults and classes.

Python tells nobody of a write there. So what the code of a forward names is looked up before it runs, and compared when
it has run: numbers, texts and tensors by their names, lists, dicts, sets, queues and plain objects by what they hold.
Functions of the same file that it names, and its own methods, are looked into too. What lies deeper is not found, and
neither is what lives in C: the second recording has to find that.
"""

from __future__ import annotations

import argparse
import contextvars
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quant.capture.forward_code import FOREIGN, names_in, own_classes, own_functions
from quant.capture.places import CONTAINERS, MISSING, Content, Context, Drawn, Name, Place, Values, items_of_container
from quant.capture.surroundings import GENERATORS
from quant.names import full_name
from quant.objects import OPAQUE, attributes_of

NAMESPACES = (types.SimpleNamespace, argparse.Namespace, threading.local)
"""Classes of Python's own whose objects are there to be written to; its others (loggers, locks) are left alone."""
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}
"""Attributes of a module that `watched.py` keeps; they are a dozen tables of hooks, and nearly always empty."""
DESCRIPTORS = (property, classmethod, staticmethod, types.MemberDescriptorType)
MOST_ITEMS, MOST_NUMBERS = 10_000, 65_536
"""Items of a container, and numbers of a tensor, that are compared and put back."""
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


def _reached(module: nn.Module, forward: Callable[..., Any]) -> Iterator[Place]:
    for one in own_functions(module, forward):
        names = names_in(one.__code__)
        for name in names & one.__globals__.keys():
            yield from _named(one.__globals__, name, one.__globals__[name], names)
        for kind in own_classes(type(module)):
            for name in names & vars(kind).keys():
                yield from _named(kind, name, vars(kind)[name], names)
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            with_value = _cell_value(cell)
            if with_value is not MISSING:
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
        for kind in own_classes(value):
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
            items = items_of_container(value)
            inner = items.values() if isinstance(items, dict) else items or ()
            for part in (*attributes_of(value).values(), *inner):
                yield from _contents(part, name, depth + 1)


def _is_written_to(value: Any) -> bool:
    if isinstance(value, CONTAINERS):
        return len(value) <= MOST_ITEMS
    if isinstance(value, OPAQUE) or callable(value):
        return False
    own = isinstance(value, NAMESPACES) or type(value).__module__.partition(".")[0] not in FOREIGN
    return own and (hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return MISSING
