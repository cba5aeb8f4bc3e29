"""Detects writes of forwards outside of their model: to globals, closures, default arguments and classes.

Python gives no notice of such a write. So the values that a forward's code names are looked up before it runs and
compared afterwards: numbers, strings and tensors by name; lists, dicts, sets, queues and plain objects by content.
Functions of the same file that it names, and its own methods, are searched too. Deeper objects and state in C are not
seen; the second recording has to show those.
"""

from __future__ import annotations

import contextvars
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from quant.capture.forward_code import FOREIGN, names_in, own_classes, own_functions
from quant.capture.places import MISSING, Content, Context, Held, Name, Place, States, contents_of

DESCRIPTORS = (property, classmethod, staticmethod, types.MemberDescriptorType)


class Outside:
    """The places outside of a model that its forwards reach.

    Attributes:
        first: for each place ever reached, its state at that time.
    """

    def __init__(self) -> None:
        self.first: States = {}
        self._frames: list[States] = []

    def enter(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Note that a module's forward begins."""
        frame: States = {}
        hooks = getattr(forward, "hooks", ())  # those that are a part of it
        for one in hooks if type(module).__module__.startswith("torch.") else (forward, *hooks):
            for place in _reached(module, one):
                if place.key not in frame:
                    frame[place.key] = Held(place, place.state())
                    self.first.setdefault(place.key, frame[place.key])
        self._frames.append(frame)

    def leave(self) -> str:
        """Note that the forward begun last has ended; returns the name of a place that it changed, or ''."""
        label = ""
        for key, held in self._frames.pop().items():
            if not held.is_as_before():
                label = label or held.place.label
                for frame in self._frames:  # it is no change of its caller's
                    if key in frame:
                        frame[key] = Held(held.place, held.place.state())
        return label

    def reached(self) -> States:
        """The objects that the forward begun last reaches."""
        return dict(self._frames[-1]) if self._frames else {}


def _reached(module: nn.Module, forward: Callable[..., Any]) -> Iterator[Place]:
    if not isinstance(forward, (types.FunctionType, types.MethodType)):  # an object that was set as the forward
        yield Content(forward, "forward")
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
            yield from contents_of(value, "a default argument")


def _named(space: Any, name: str, value: Any, names: frozenset[str]) -> Iterator[Place]:
    """The places behind a name: its value and, where that is mutable, the content of the value."""
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
        yield from contents_of(value, name)


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return MISSING
