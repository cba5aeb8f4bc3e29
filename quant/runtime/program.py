"""A converted program as data: its values and instructions, and what can be computed from these alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from quant.runtime.expected_call import ExpectedCall
from quant.runtime.filling import Fill, filler
from quant.runtime.instructions import Instruction, registers_in
from quant.runtime.program_text import program_text
from quant.runtime.values import Value, at

if TYPE_CHECKING:
    from quant.runtime.schedule import Schedule


@dataclass(eq=False, repr=False)
class Program:
    """The computation of a converted module: instructions in order, over values.

    Attributes:
        values: the value with id n at index n.
        inputs: ids of the float values that exist before the first instruction.
        output: nested, with Ref to values.
        drops: for each instruction, the values that no later instruction reads.
        sizes: symbol in the shapes of values -> its size at capture.
        call: the calls that it stands for; None for a program that is not a module's forward.
        schedule: which instructions run as one native call; None where all run one by one.
    """

    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    instructions: list[Instruction]
    output: Any
    drops: list[list[int]]
    sizes: dict[str, int]
    call: ExpectedCall | None = None
    schedule: Schedule | None = field(default=None, repr=False, compare=False)
    _fill: Fill | None = field(default=None, repr=False, compare=False)

    def filled(self, registers: dict[int, Any]) -> Any:
        """The output for the registers at the end of a run."""
        fill = self._fill
        if fill is None:
            fill = self._fill = filler(self.output)
        return fill(registers)

    @functools.cached_property
    def input_of(self) -> dict[int, int]:
        """Node of the graph -> id of the input that holds its value."""
        return {self.values[one].node: one for one in self.inputs}

    def shape(self, value: int) -> tuple[int, ...] | None:
        """The shape of a value at capture; None where it is not a tensor."""
        shape = self.values[value].shape
        return None if shape is None else tuple(at(size, self.sizes) for size in shape)

    def __str__(self) -> str:
        return program_text(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and alike(self._parts, other._parts)

    __hash__ = None  # type: ignore[assignment]

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.values, self.inputs, self.instructions, self.output, self.sizes, self.call

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fill": None}


def unread(instructions: list[Instruction], output: Any) -> list[list[int]]:
    """For each instruction, the values that no later one reads."""
    kept = registers_in(output)
    drops: list[list[int]] = []
    for instruction in reversed(instructions):
        read = instruction.reads | {instruction.out}
        drops.append(sorted(read - kept))
        kept |= read
    return drops[::-1]


def live(instructions: list[Instruction], output: Any) -> list[Instruction]:
    """The instructions whose values are read, and those with an effect besides their value."""
    needed = registers_in(output)
    kept = []
    for instruction in reversed(instructions):
        if instruction.acts or instruction.out in needed:
            kept.append(instruction)
            needed |= instruction.reads
    return kept[::-1]


def alike(one: Any, other: Any) -> bool:
    """Whether two nested values are equal: tensors and arrays by their elements, and NaN equals NaN."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        bits = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and numpy.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, complex):
        return alike((one.real, one.imag), (other.real, other.imag))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, slice):
        return alike((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    if is_dataclass(one):
        names = [item.name for item in fields(one) if item.compare]
        return all(alike(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)
