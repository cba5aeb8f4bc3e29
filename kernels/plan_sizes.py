"""Sizes in a plan's text: a number, the size of a register's dimension (%3.1), or arithmetic of sizes: `(%3.1//8)`.

Each operation stands in brackets, so that there is no precedence. The C++ reads the same in csrc/core/plan/sizes.cpp.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MOST = 1 << 40
"""Of a number in brackets and of each result: more than memory holds."""

DEPTH = 32
"""Of brackets in brackets."""

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "mod": operator.mod,
    "min": min,
    "max": max,
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}
"""Python's arithmetic of ints; comparisons give 0 or 1. Of two names where one begins with the other, the longer stands
first."""


def check_memory(sizes: Sequence[float], name: str) -> None:
    """Raise ValueError for more values than memory holds."""
    # A graph has others, which it would guard; and an empty tensor has strides, too.
    known = [max(size, 1) for size in sizes if isinstance(size, (int, float))]
    if math.prod(known) > MOST:
        raise ValueError(f"{name} would have more than 2**40 values")


@dataclass(frozen=True)
class Arithmetic:
    """An operation on two sizes; each is an int, an `Arithmetic`, or what stands for the size of a dimension."""

    operation: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"({self.left}{self.operation}{self.right})"


def dimensions_in(size: Any) -> Iterator[Any]:
    """What stands for sizes of dimensions in a size."""
    if isinstance(size, Arithmetic):
        yield from dimensions_in(size.left)
        yield from dimensions_in(size.right)
    elif not isinstance(size, int):
        yield size


def number_of(size: Any, dimension: Callable[[Any], Any]) -> Any:
    """The number that a size is.

    Args:
        dimension: the size of a dimension.

    Raises:
        ValueError: a size is divided by zero, or beyond MOST.
    """
    if not isinstance(size, Arithmetic):
        return size if isinstance(size, int) else dimension(size)
    left, right = number_of(size.left, dimension), number_of(size.right, dimension)
    if size.operation in ("//", "mod") and right == 0:
        raise ValueError("a size is divided by zero")
    number = OPERATIONS[size.operation](left, right)
    number = int(bool(number)) if size.operation in ("<=", "<", "==", "!=") else number
    if not -MOST <= number <= MOST:
        raise ValueError("a size is beyond 2**40")
    return number


def parse(word: str, dimension: Callable[[int, int], Any]) -> Any:
    """Parse a size.

    Args:
        dimension: makes what stands for the size of a register's dimension.

    Raises:
        ValueError: the word is no size.
    """
    size, end = _operand(word, 0, 0, dimension)
    if end != len(word):
        raise ValueError(f"'{word}' is no size")
    return size


def _operand(word: str, at: int, depth: int, dimension: Callable[[int, int], Any]) -> tuple[Any, int]:
    """The operand that begins at a place, and where it ends."""
    if word.startswith("(", at):
        if depth == DEPTH:
            raise ValueError(f"'{word}' has more than {DEPTH} brackets in each other")
        left, at = _operand(word, at + 1, depth + 1, dimension)
        name = next((name for name in OPERATIONS if word.startswith(name, at)), None)
        if name is None:
            raise ValueError(f"'{word}' is no size")
        right, at = _operand(word, at + len(name), depth + 1, dimension)
        if not word.startswith(")", at):
            raise ValueError(f"'{word}' is no size")
        return Arithmetic(name, left, right), at + 1
    matched = _DIMENSION.match(word, at) or _NUMBER.match(word, at)
    if matched is None or any(not -(2**63) <= int(number) < 2**63 for number in matched.groups()):
        raise ValueError(f"'{word}' is no size")
    numbers = [int(number) for number in matched.groups()]
    if len(numbers) == 2:
        return dimension(*numbers), matched.end()
    if depth and abs(numbers[0]) > MOST:
        raise ValueError(f"'{word}' is no size")
    return numbers[0], matched.end()


_NUMBER = re.compile(r"(-?[0-9]+)")
_DIMENSION = re.compile(r"%([0-9]+)\.(-?[0-9]+)")
