"""Places that a forward may write to without torch noticing: their state, to compare and to restore."""

from __future__ import annotations

import argparse
import collections
import contextvars
import threading
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from quant.capture.forward_code import FOREIGN
from quant.capture.random_draws import GENERATORS, generator_key, generator_state, set_generator
from quant.capture.sameness import same, same_content
from quant.runtime.objects import OPAQUE, attributes_of, fill

CONTAINERS = (list, dict, set, collections.deque, bytearray)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace, threading.local)
"""Classes of Python's library whose objects hold state for users; its others (loggers, locks) are ignored."""
MOST_ITEMS, MOST_NUMBERS = 10_000, 65_536
"""Largest number of items of a container, and of values of a tensor, that are compared and restored."""
MISSING = object()
"""The state of a place without a value."""


class Place:
    """A place that can be written to.

    Attributes:
        key: identifies it: the id of an object, and a name in it.
        label: its name in reports.
    """

    def __init__(self, value: Any, label: str, name: str = "") -> None:
        self.key, self.label = (id(value), name), label

    def state(self) -> Any:
        """The current state."""
        raise NotImplementedError

    def put_back(self, state: Any) -> None:
        """Restore a state."""
        raise NotImplementedError

    @staticmethod
    def same(one: Any, other: Any) -> bool:
        """Whether two states of such a place are equal."""
        return same(one, other)

    def is_as(self, state: Any) -> bool:
        """Whether the current state equals `state`."""
        return self.same(self.state(), state)


class Name(Place):
    """The value of a name in a namespace: globals, a class, a Python module, a function, or a closure's cell."""

    def __init__(self, space: Any, name: str) -> None:
        super().__init__(space, name, name)
        self.space = space

    def state(self) -> Any:
        if isinstance(self.space, dict):
            return self.space.get(self.label, MISSING)
        if isinstance(self.space, types.CellType):
            return self.space.cell_contents
        return vars(self.space).get(self.label, MISSING)

    def put_back(self, state: Any) -> None:
        if isinstance(self.space, types.CellType):
            self.space.cell_contents = state
        elif state is MISSING:
            self.space.pop(self.label, None) if isinstance(self.space, dict) else delattr(self.space, self.label)
        elif isinstance(self.space, dict):
            self.space[self.label] = state
        else:
            setattr(self.space, self.label, state)


class Content(Place):
    """The content of a container or plain object."""

    def __init__(self, value: Any, label: str) -> None:
        super().__init__(value, label)
        self.value = value

    def state(self) -> Any:
        return attributes_of(self.value), items_of_container(self.value)

    def is_as(self, state: Any) -> bool:
        return _holds_these(self.value, state[1]) or super().is_as(state)

    def put_back(self, state: Any) -> None:
        if isinstance(self.value, (set, bytearray)):
            self.value.clear()
            self.value.update(state[1]) if isinstance(self.value, set) else self.value.extend(state[1])
        else:
            fill(self.value, *state)

    @staticmethod
    def same(one: Any, other: Any) -> bool:
        return same_content(one, other)


class Context(Place):
    """The value of a context variable."""

    def __init__(self, variable: contextvars.ContextVar[Any], label: str) -> None:
        super().__init__(variable, label)
        self.variable = variable

    def state(self) -> Any:
        return self.variable.get(MISSING)

    def put_back(self, state: Any) -> None:
        if state is not MISSING:
            self.variable.set(state)


class Values(Place):
    """The values of a tensor that no module holds."""

    def __init__(self, tensor: Tensor, label: str) -> None:
        super().__init__(tensor, label)
        self.tensor = tensor

    def state(self) -> Any:
        return self.tensor._version, self.tensor.detach().clone()

    def put_back(self, state: Any) -> None:
        with torch.no_grad():
            self.tensor.detach().copy_(state[1])

    def is_as(self, state: Any) -> bool:
        return bool(self.tensor._version == state[0])

    @staticmethod
    def same(one: Any, other: Any) -> bool:
        return bool(one[0] == other[0])


class Drawn(Place):
    """The state of a random generator."""

    def __init__(self, generator: Any, label: str) -> None:
        super().__init__(generator, label)
        self.generator = generator

    def state(self) -> Any:
        return generator_state(self.generator)

    def put_back(self, state: Any) -> None:
        set_generator(self.generator, state)

    @staticmethod
    def same(one: Any, other: Any) -> bool:
        return bool(generator_key(one) == generator_key(other))


@dataclass(frozen=True)
class Held:
    """A place, with its state at one time."""

    place: Place
    state: Any

    def is_as_before(self) -> bool:
        return self.place.is_as(self.state)

    def put_back(self) -> None:
        self.place.put_back(self.state)


States = dict[Any, Held]
"""Key of a place -> its state."""


class Checked:
    """Whether places are unchanged, each checked once, since many modules hold the same configuration."""

    def __init__(self) -> None:
        self._unchanged: dict[int, bool] = {}

    def is_as_before(self, held: Held) -> bool:
        unchanged = self._unchanged.get(id(held))
        if unchanged is None:
            unchanged = self._unchanged[id(held)] = held.is_as_before()
        return unchanged


class Places:
    """The states of the places that modules hold or forwards reach, each saved once.

    Args:
        known: those of an earlier snapshot, by key; reused where a place is unchanged.
    """

    def __init__(self, known: States, checked: Checked) -> None:
        self.held: States = {}
        self._known, self._checked = known, checked

    def of(self, place: Place) -> Held:
        """The state of a place."""
        held = self.held.get(place.key)
        if held is None:
            held = self._known.get(place.key)
            if held is None or not self._checked.is_as_before(held):
                held = Held(place, place.state())
            self.held[place.key] = held
        return held

    def keep(self, held: Iterable[Held]) -> None:
        """Reuse the objects of an earlier snapshot; those not kept are released, as they may hold many tensors."""
        for one in held:
            self.held[one.place.key] = one


def alike(one: States, other: States) -> bool:
    """Whether two calls reached the same objects."""
    return one.keys() == other.keys() and all(
        held.place.same(held.state, other[key].state) for key, held in one.items()
    )


def contents_of(value: Any, name: str, depth: int = 0) -> Iterator[Place]:
    """The mutable places in a value and in the values it holds."""
    if isinstance(value, GENERATORS):
        yield Drawn(value, name)
    elif isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_inference() and value.numel() <= MOST_NUMBERS:
            yield Values(value, name)
    elif 0 < depth < 3 and isinstance(value, nn.Module):  # one that is not registered
        yield Content(value, name)
        for part in vars(value).values():
            yield from contents_of(part, name, depth + 1)
    elif _is_written_to(value):
        yield Content(value, name)
        if depth < 2:
            items = items_of_container(value)
            inner = items.values() if isinstance(items, dict) else items or ()
            for part in (*attributes_of(value).values(), *inner):
                yield from contents_of(part, name, depth + 1)


def _is_written_to(value: Any) -> bool:
    if isinstance(value, CONTAINERS):
        return len(value) <= MOST_ITEMS
    if isinstance(value, OPAQUE) or callable(value):
        return False
    own = isinstance(value, NAMESPACES) or type(value).__module__.partition(".")[0] not in FOREIGN
    return own and (hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))


def _holds_these(value: Any, items: Any) -> bool:
    """Whether a plain list or dict has the very same items: nearly always, and asked in a third of the time."""
    if type(value) is list:
        return len(value) == len(items) and all(map(is_, value, items))
    if type(value) is dict:
        return (
            len(value) == len(items) and all(map(is_, value, items)) and all(map(is_, value.values(), items.values()))
        )
    return False


def items_of_container(value: Any) -> Any:
    """The stored items of a container; access methods of its class may create objects (in transformers)."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list):
        return list(list.__iter__(value))
    return list(value) if isinstance(value, CONTAINERS) else None
