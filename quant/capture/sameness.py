"""Whether a value was replaced by another, whatever happened to its content."""

from __future__ import annotations

from typing import Any


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or equal numbers or strings."""
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all_same(one, other)
    return type(one) is type(other) and isinstance(one, (int, float, str)) and one == other


def all_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether `same` holds for all pairs."""
    return len(one) == len(other) and all(map(same, one, other))


def same_content(one: tuple[dict[str, Any], Any], other: tuple[dict[str, Any], Any]) -> bool:
    """Whether no part of an object was replaced, for two results of `objects.content`."""
    return all(all_same(flat(a), flat(b)) for a, b in zip(one, other, strict=True))


def flat(items: Any) -> tuple[Any, ...]:
    """The items of a container, or keys and values of a dict, in one list; empty for other values."""
    return tuple(items.items() if isinstance(items, dict) else items or ())
