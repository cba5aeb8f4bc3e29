"""The locals of a forward's code that follow from counting to a value: `for i in range(n)`, `j = i + 1`."""

from __future__ import annotations

import dis
import enum
import itertools
from collections.abc import Collection
from typing import Any

from quant.capture.forward_code import PERCENT
from quant.capture.instructions import (
    ATTRIBUTES,
    CONSTANTS,
    COPIES,
    NAMES,
    QUOTIENTS,
    SUMS,
    expression,
    is_any_load,
    is_load,
    is_shift,
    is_store,
    is_store_or_unpack,
    locals_read,
    names_read,
)  # fmt: skip

NOTED = {"shape", "size", "len", "numel"}
"""Names in what is computed of sizes, which are noted."""

UNFIXED = {*NOTED, "range", "arange", "torch"}
"""Names in what may follow from sizes, or be a tensor."""

Step = int | tuple[str, ...] | None
"""A constant; the attributes that lead from the module to it; or None, where it is computed."""


class Iterable(enum.Enum):
    """What a loop goes over: what follows from the module alone, what a local has, or a counter's numbers."""

    MODULE = enum.auto()
    LOCAL = enum.auto()
    COUNTER = enum.auto()


class Counts:
    """The locals of code that follow from counting to a value.

    Attributes:
        constants: the locals that are one int and nothing else.
        fixed: those that are computed from neither arguments nor sizes.
        of: a loop's variables, what a counter gave, and what is computed of these -> (factor, offset): the place that
            is counted to is at most (value + offset) * factor; None where it is computed in another way.
        surely: those that do not only go over a local.
    """

    def __init__(self, instructions: list[dis.Instruction], argument: Iterable) -> None:
        self.constants = _constants(instructions)
        stores: list[tuple[str, list[dis.Instruction]]] = []
        for place, one in enumerate(instructions):
            if is_store(one):  # of `a, b = ...` the second is stored right after the first
                before = stores[-1][1] if place and is_store(instructions[place - 1]) else None
                stores.append((one.argval, expression(instructions[:place]) if before is None else before))
        counters = {name for name, whole in stores if has_counter(whole)}
        looped, self.surely = _looped(instructions, argument, counters)
        self.surely |= counters
        self.of: dict[str, tuple[int, int] | None] = dict.fromkeys(looped | counters, (1, 0))
        self.fixed = self._fixed(stores)
        for _ in range(2):  # a local of a local; and in a loop of one that is stored further down
            for name, whole in stores:
                self._note(name, whole)

    def _fixed(self, stores: list[tuple[str, list[dis.Instruction]]]) -> set[str]:
        fixed = {name for name, _ in stores} - {name for name, whole in stores if not any(map(is_any_load, whole))}
        fixed -= self.of.keys()
        while True:
            other = {
                name for name, whole in stores if locals_read(whole) - fixed - {"self"} or names_read(whole) & UNFIXED
            }
            if not fixed & other:
                return fixed
            fixed -= other

    def _note(self, name: str, whole: list[dis.Instruction]) -> None:
        """Note a local that is stored, by what computes it."""
        read = locals_read(whole)
        others = read - self.of.keys() - self.constants.keys() - self.fixed - {"self"}
        if name not in self.of and read & self.surely and not others and "torch" not in names_read(whole):
            self.of[name] = self._scale(whole)
            self.surely.add(name)

    def _scale(self, whole: list[dis.Instruction]) -> tuple[int, int] | None:
        """How a value is computed of counts: None where by anything but sums, quotients and remainders of constants."""
        factor, offset, number = 1, 0, 0
        for one in whole:
            if is_load(one) and one.argval in self.of:
                known = self.of[one.argval]
                if known is None:
                    return None
                factor, offset = max(factor, known[0]), offset + known[1]
                continue
            if one.opname in CONSTANTS or (is_load(one) and one.argval in self.constants):
                number = self.constants[one.argval] if is_load(one) else one.argval
                if type(number) is not int:
                    return None
                offset += abs(number)
            elif (one.opname, one.argrepr) in QUOTIENTS | PERCENT:
                offset -= abs(number)
                if (one.opname, one.argrepr) in PERCENT:
                    continue
                factor *= 1 << min(abs(number), 64) if is_shift(one) else max(abs(number), 1)
            elif one.opname not in COPIES and (one.opname, one.argrepr) not in SUMS:
                return None
        return factor, offset

    def reached(self, name: str, value: int) -> int:
        """The place that is counted to where a local that follows from it, in a known way, has a value."""
        factor, offset = self.of[name] or (1, 0)
        return (value + offset) * factor

    def of_comparison(self, whole: list[dis.Instruction]) -> list[Step]:
        """The steps of a comparison that has a count anywhere: none where sizes or other locals are read too."""
        if has_counter(whole):
            return self._up_to(whole)
        read, names = locals_read(whole), names_read(whole)
        if not read & self.of.keys() or names & NOTED or any((one.opname, one.argrepr) in PERCENT for one in whole):
            return []
        if swapped := _swapped(whole, self.of.keys()):
            return [None] if swapped not in self.constants else [abs(self.constants[swapped]) + 1]
        others = read - self.of.keys() - {"self"} - self.constants.keys()
        if others:
            return [None] if others <= self.fixed else []
        calls = [one for one in whole if not is_load(one) and one.opname not in (*CONSTANTS, *COPIES)]
        if not calls and any(one.opname in CONSTANTS and isinstance(one.argval, str) for one in whole):
            return []  # no number is a text
        if "self" in read or not all((one.opname, one.argrepr) in SUMS for one in calls):
            return [None]
        return self._up_to(whole)

    def _up_to(self, whole: list[dis.Instruction]) -> list[Step]:
        """The step of a comparison with constants; None where it has anything else but a count."""
        numbers = []
        for one in whole:
            if one.opname in CONSTANTS:
                many = isinstance(one.argval, (tuple, frozenset))
                given = [number for number in (one.argval if many else (one.argval,)) if not isinstance(number, str)]
                if not all(isinstance(number, int) for number in given if number is not None):
                    return [None]
                numbers += [abs(number) for number in given if number is not None]
            elif is_load(one) and one.argval in self.constants:
                numbers.append(abs(self.constants[one.argval]))
            elif is_load(one) and (one.argval == "self" or one.argval in self.fixed):
                return [None]
        scales = [self.of[name] for name in locals_read(whole) if name in self.of]
        if None in scales:
            return [None]
        factors, offsets = [1], 0
        for scale in scales:
            assert scale is not None
            factors.append(scale[0])
            offsets += scale[1]
        return [(sum(numbers) + offsets + 1) * max(factors)]

    def of_condition(self, whole: list[dis.Instruction]) -> list[Step]:
        """The steps of a condition that is no comparison: `if far(i)`."""
        signs = {(one.opname, one.argrepr) for one in whole}
        if not locals_read(whole) & self.surely or any(one.opname == "IS_OP" for one in whole) or signs & QUOTIENTS:
            return []  # quotients have strides of their own
        return self.of_comparison([one for one in whole if one.opname != "TO_BOOL"])


def _swapped(whole: list[dis.Instruction], looped: Collection[str]) -> str:
    """The local before a loop's variable, where a comparison has nothing else; else ''."""
    names = [one.argval if is_load(one) else "" for one in whole]
    return names[0] if len(names) == 2 and names[1] in looped and names[0] not in looped else ""


def _looped(
    instructions: list[dis.Instruction], argument: Iterable, counters: Collection[str]
) -> tuple[set[str], set[str]]:
    """The locals that are a loop's variable, of a loop that may count to a size; and those of loops over a counter.

    A loop over what the module has does not count to a size, nor does one over lengths, which are held where they are
    sizes. Of several variables those of a counter's loop alone: `for i, j in enumerate(range(n))`.
    """
    looped, surely = set[str](), set[str]()
    over: list[dis.Instruction] = []
    for place, one in enumerate(instructions):
        if one.opname == "GET_ITER":
            over = expression(instructions[:place])
        if one.opname != "FOR_ITER":
            continue
        kind = iterable_of(over, counters) if over else argument
        names = [
            store.argval
            for store in itertools.takewhile(is_store_or_unpack, instructions[place + 1 :])
            if is_store(store)
        ]
        looped |= set(names) if kind is Iterable.COUNTER or (kind is Iterable.LOCAL and len(names) == 1) else set()
        surely |= set(names) if kind is Iterable.COUNTER else set()
    return looped, surely


def iterable_of(over: list[dis.Instruction], counters: Collection[str]) -> Iterable:
    """What an expression is as an iterable, where some locals are what counters gave."""
    if has_counter(over) or locals_read(over) & set(counters):
        return Iterable.COUNTER
    return Iterable.LOCAL if _may_be_sized(over) else Iterable.MODULE


def has_counter(whole: list[dis.Instruction]) -> bool:
    """Whether an expression calls `range` or an `arange` up to what may follow from a size, for no tensor."""
    places = (place for place in range(len(whole)) if loads_counter(whole, place))
    return "torch" not in names_read(whole) and any(_may_be_sized(whole[place + 1 :]) for place in places)


def loads_counter(instructions: list[dis.Instruction], place: int) -> bool:
    """Whether an instruction loads Python's `range`, or an `arange` other than torch's, which notes its sizes."""
    one = instructions[place]
    if one.opname in NAMES:
        return one.argval in ("range", "arange")
    return one.opname in ATTRIBUTES and one.argval == "arange" and instructions[place - 1].argval != "torch"


def _may_be_sized(iterable: list[dis.Instruction]) -> bool:
    """Whether what a loop goes over may follow from a size: it reads a local other than by `len`."""
    read = [place for place, one in enumerate(iterable) if is_load(one) and one.argval != "self"]
    return any("len" not in [one.argval for one in iterable[max(place - 2, 0) : place]] for place in read)


def _constants(instructions: list[dis.Instruction]) -> dict[str, int]:
    """The locals that are one int and nothing else."""
    stored: dict[str, list[Any]] = {}
    for before, one in itertools.pairwise(instructions):
        if is_store(one):
            stored.setdefault(one.argval, []).append(before.argval if before.opname in CONSTANTS else None)
    return {name: given[0] for name, given in stored.items() if len(given) == 1 and isinstance(given[0], int)}
