"""Random generators that a forward may draw from without torch noticing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, Sampler


class Chance:
    """Watches the generators of Python and numpy, and those in attributes of modules.

    Draws from torch's own generators are calls of the graph; draws from these are not.
    """

    def __init__(self, generators: list[Any]) -> None:
        self._generators = generators
        self._last = self._state()

    def was_drawn_from(self) -> bool:
        """Whether numbers were drawn since the last call of this method, or since the beginning."""
        before, self._last = self._last, self._state()
        return before != self._last

    def _state(self) -> list[Any]:
        states = (numpy.random.get_state(legacy=False), *map(generator_state, self._generators))
        return [random.getstate(), *map(generator_key, states)]


def torch_state() -> list[torch.Tensor]:
    """The states of torch's own generators: the CPU's, and those of the GPUs once they are in use."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def set_torch_state(states: list[torch.Tensor]) -> None:
    """Let torch's own generators draw from such states again."""
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])


@contextlib.contextmanager
def put_back_draws() -> Iterator[None]:
    """Let torch's own generators be at the end where they were before."""
    states = torch_state()
    try:
        yield
    finally:
        set_torch_state(states)


def seed(number: int) -> None:
    """Seed the global generators, so that a forward which reads their seeds or states differs between recordings."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)


class Drawn:
    """The states of the generators of torch, Python and numpy, and of some more, to draw from again."""

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        self._own = [(one, generator_state(one)) for one in generators]
        self._torch, self._python, self._numpy = torch_state(), random.getstate(), numpy.random.get_state()

    def put_back(self) -> None:
        """Restore them."""
        for generator, state in self._own:
            set_generator(generator, state)
        set_torch_state(self._torch)
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)


@contextlib.contextmanager
def undrawn(batches: Iterable[Any]) -> Iterator[None]:
    """Let the generators that an iterable of batches draws from be at the end where they were before."""
    before = Drawn(_generators_of(batches, set()))
    try:
        yield
    finally:
        before.put_back()


def _generators_of(source: Any, seen: set[int]) -> Iterator[Any]:
    """The generators in an iterable's attributes, and in those of what torch's loaders draw from."""
    seen.add(id(source))
    for value in list(getattr(source, "__dict__", {}).values()):
        if id(value) in seen:
            continue
        if isinstance(value, GENERATORS):
            seen.add(id(value))
            yield value
        elif isinstance(value, (DataLoader, Sampler, Dataset)):
            yield from _generators_of(value, seen)


GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)


def generator_state(generator: Any) -> Any:
    """The state of a generator."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_generator(generator: Any, state: Any) -> None:
    """Restore the state of a generator."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def generator_key(state: Any) -> Any:
    """A generator's state, which contains arrays, in a comparable form."""
    if isinstance(state, dict):
        return {name: generator_key(value) for name, value in state.items()}
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return state.tobytes() if isinstance(state, numpy.ndarray) else state
