"""What a forward uses beside its arguments, of which torch tells nobody: swapped parameters, and draws of chance."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

OTHER_PARAMETERS = "it is called with parameters that are not its own"


class OwnParameters:
    """The parameters and buffers that the modules had before a call: `torch.func.functional_call` puts others there."""

    def __init__(self, root: nn.Module) -> None:
        self._held = {id(module): _stored(module) for module in root.modules()}

    def are_swapped(self, module: nn.Module) -> bool:
        """Whether a module, or one in it, has others now."""
        if isinstance(module, torch.jit.ScriptModule):
            return False
        return any(
            not all(value is held.get(name) for name, value in _stored(part).items())
            for part in module.modules()
            if (held := self._held.get(id(part))) is not None
        )


def _stored(module: nn.Module) -> dict[str, Any]:
    return {**(module.__dict__.get("_parameters") or {}), **(module.__dict__.get("_buffers") or {})}


class Chance:
    """The random numbers that Python and numpy draw: torch's own draws are calls of the graph, these are not.

    Of generators that a module keeps as attributes too.
    """

    def __init__(self, root: nn.Module) -> None:
        self._generators = generators(root)
        self._last = self._state()

    def was_drawn_from(self) -> bool:
        """Whether numbers were drawn since this was asked last, or since the beginning."""
        before, self._last = self._last, self._state()
        return before != self._last

    def _state(self) -> list[Any]:
        states = (numpy.random.get_state(legacy=False), *map(generator_state, self._generators))
        return [random.getstate(), *map(generator_key, states)]


GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)


def generators(root: nn.Module) -> list[Any]:
    """The generators of random numbers that modules hold as attributes."""
    return [value for module in root.modules() for value in vars(module).values() if isinstance(value, GENERATORS)]


def generator_state(generator: Any) -> Any:
    """What a generator will draw from."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_generator(generator: Any, state: Any) -> None:
    """Let a generator draw from such a state again."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def generator_key(state: Any) -> Any:
    """A generator's state, which has arrays in it, as what can be compared."""
    if isinstance(state, dict):
        return {name: generator_key(value) for name, value in state.items()}
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return state.tobytes() if isinstance(state, numpy.ndarray) else state


def generator_states(root: nn.Module) -> Callable[[], None]:
    """What puts the generators that modules hold back to what they are now."""
    found = [(one, generator_state(one)) for one in generators(root)]

    def put_back() -> None:
        for one, state in found:
            set_generator(one, state)

    return put_back
