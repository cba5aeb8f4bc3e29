"""Places that a forward may write to and torch tells nobody of: what is there, whether it is as before, put back."""

from __future__ import annotations

import collections
import contextvars
import types
from typing import Any

import torch
from torch import Tensor

from quant.capture.state import same, same_content
from quant.capture.surroundings import generator_key, generator_state, set_generator
from quant.objects import attributes_of, fill

CONTAINERS = (list, dict, set, collections.deque, bytearray)
MISSING = object()
"""What is at a place where nothing is."""


class Name:
    """What a name stands for in a namespace: globals, a class, a Python module, a function, or a closure's cell."""

    def __init__(self, space: Any, name: str) -> None:
        self.space, self.label = space, name
        self.key = (id(space), name)

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

    same = staticmethod(same)


class Content:
    """What a container or a plain object holds."""

    def __init__(self, value: Any, label: str) -> None:
        self.value, self.label = value, label
        self.key = (id(value), "")

    def state(self) -> Any:
        return attributes_of(self.value), items_of_container(self.value)

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
        return self.variable.get(MISSING)

    def put_back(self, state: Any) -> None:
        if state is not MISSING:
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


def items_of_container(value: Any) -> Any:
    """What a container holds, whatever its class gives when it is asked: transformers' tables make new objects."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list):
        return list(list.__iter__(value))
    return list(value) if isinstance(value, CONTAINERS) else None
