"""What JSON from a file may be, asked before anything is built from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_text(value: Any) -> bool:
    """Whether it is a text."""
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    """Whether it is a number of things, or of bytes."""
    return type(value) is int and 0 <= value < 1 << 63


def is_list(value: Any, holds: Callable[[Any], bool]) -> bool:
    """Whether it is a list of what `holds` accepts."""
    return isinstance(value, list) and all(map(holds, value))


def is_table(value: Any, holds: Callable[[Any], bool]) -> bool:
    """Whether it is a table whose values `holds` accepts."""
    return isinstance(value, dict) and all(map(holds, value.values()))
