"""What a case of the catalogue is: a small module whose forward does something hostile, and its inputs.

A case is registered by `@case("what it does, in words")` on a module class that takes no arguments. Layers are wide and
inputs uniform, so that honest int8 is right to 25 dB and more: whatever is below the floor is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Inputs: TypeAlias = "tuple[Any, ...] | dict[str, Any]"
Maker: TypeAlias = Callable[[int, int, int], Inputs]
"""(batch, length, index) -> positional or keyword arguments; torch's generator is seeded by the index before."""

WIDTH = 16
BATCH, LENGTH = 16, 6
"""Of the calibration, of the example inputs and of the first fresh inputs."""
OTHER = (5, 9)
"""Batch and length of the last fresh inputs."""


@dataclass(frozen=True)
class Case:
    """One module, and what is expected of its quantised forms.

    Attributes:
        title: what its forward does, in words; unique.
        module: makes the float model.
        inputs: makes a call's arguments.
        other: batch and length of the last inputs; None where the model takes one size only.
        integers: "equal", or "mostly" where they come out of rounded values: then one of four may differ.
        floor: smallest signal to noise ratio of every float tensor of the output, in dB.
        read: turns the output into what is compared, for outputs that cannot be looked into (a function, say).
        state: what else is compared after each call: called with the model.
        reset: sets globals back, before each sequence of calls.
        child: it can end the process, so it runs in one of its own.
        refusal: why a clear error is right as well; "" where it must run.
        needs: of what the installed torch or a library has to have; "" for nothing.
    """

    title: str
    module: Callable[[], nn.Module]
    inputs: Maker
    other: tuple[int, int] | None = OTHER
    integers: str = "equal"
    floor: float = 20.0
    read: Callable[[Any], Any] | None = None
    state: Callable[[nn.Module], Any] | None = None
    reset: Callable[[], None] | None = None
    child: bool = False
    refusal: str = ""

    def build(self) -> nn.Module:
        """The float model, the same each time."""
        if self.reset is not None:
            self.reset()
        torch.manual_seed(0)
        return self.module().eval()

    def call(self, model: nn.Module, inputs: Inputs) -> Any:
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)

    def make(self, batch: int, length: int, index: int) -> Inputs:
        """The inputs of one call, new tensors each time."""
        torch.manual_seed(1000 + index)
        return self.inputs(batch, length, index)


@dataclass
class Catalogue:
    """All cases, by title."""

    cases: dict[str, Case] = field(default_factory=dict)

    def add(self, new: Case) -> None:
        assert new.title not in self.cases, f"two cases are called {new.title!r}"
        self.cases[new.title] = new


CATALOGUE = Catalogue()


def uniform(*shape: int) -> Tensor:
    """In [-1, 1]: values of other batches do not leave the range of the calibration's."""
    return torch.rand(*shape) * 2 - 1


def rows(batch: int, length: int, index: int) -> Inputs:
    return (uniform(batch, WIDTH),)


def two_rows(batch: int, length: int, index: int) -> Inputs:
    return uniform(batch, WIDTH), uniform(batch, WIDTH)


def steps(batch: int, length: int, index: int) -> Inputs:
    return (uniform(batch, length, WIDTH),)


def images(batch: int, length: int, index: int) -> Inputs:
    return (uniform(batch, 3, 2 * length, 2 * length),)


def signed_rows(batch: int, length: int, index: int) -> Inputs:
    """Rows whose mean is near 0.4 and near -0.4 in turn, five standard deviations from 0; in [-3, 3] every time.

    No more than that: a range in training is a moving average, and may not be far from the last batch's.
    """
    x = uniform(batch, WIDTH) * 2 + (0.4 if index % 2 else -0.4)
    x[:, 0], x[:, 1] = 3.0, -3.0
    return (x,)


def case(title: str, inputs: Maker = rows, **settings: Any) -> Callable[[Any], Any]:
    """Register a module class, or a function that makes a module, as a case of the catalogue."""

    def register(module: Any) -> Any:
        CATALOGUE.add(Case(title, module, inputs, **settings))
        return module

    return register


class TwoLayers(nn.Module):
    """What most cases put something between: 16 -> 32 -> 16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 32)
        self.last = nn.Linear(32, WIDTH)
