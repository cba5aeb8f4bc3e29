"""When something is still what it was: nothing was put in its place, whatever it holds."""

from __future__ import annotations

from typing import Any


def same(one: Any, other: Any) -> bool:
    """Whether nothing was put in place of something: the same object, or an equal number or text."""
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all_same(one, other)
    return type(one) is type(other) and isinstance(one, (int, float, str)) and one == other


def all_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether that holds for each of several things."""
    return len(one) == len(other) and all(map(same, one, other))


def same_content(one: tuple[dict[str, Any], Any], other: tuple[dict[str, Any], Any]) -> bool:
    """Whether nothing was put in place of something in an object, by what `objects.content` gave of it."""
    return all(all_same(flat(a), flat(b)) for a, b in zip(one, other, strict=True))


def flat(items: Any) -> tuple[Any, ...]:
    """The items of a container, or the pairs of a dict, one after the other; none of what is no container."""
    return tuple(items.items() if isinstance(items, dict) else items or ())
