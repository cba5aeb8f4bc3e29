"""Names in exported models: of what a model returns, and lists of names in messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quant.runtime.objects import Instance, Result
from quant.runtime.trees import Ref

MOST_NAMED = 8
"""Names in a message; the others are counted."""


def listed(names: Iterable[str]) -> str:
    """Names in a row, at most `MOST_NAMED`."""
    every = list(names)
    more = f" and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
    return ", ".join(every[:MOST_NAMED]) + more


def named_leaves(output: Any, prefix: str = "", name: str = "") -> Iterator[tuple[str, Any]]:
    """What a program returns, but None, by the names in it: keys, fields or places.

    Args:
        prefix: of the places of a tuple or list that is the whole output.
        name: of `output` itself; empty for the whole.
    """
    if isinstance(output, Result):
        output = output.value
    children = children_of(output)
    if children is not None:
        for key, value in children:
            yield from named_leaves(value, prefix, child_name(output, key, prefix, name))
    elif output is not None:
        yield name or "output", output


def children_of(output: Any) -> list[tuple[Any, Any]] | None:
    """What a container or an object holds, each with its key, field or place; None of a leaf."""
    if isinstance(output, Instance):
        items = output.attributes if output.items is None else output.items
        return list(items.items() if isinstance(items, Mapping) else enumerate(items))
    if isinstance(output, Mapping):
        return list(output.items())
    if isinstance(output, (tuple, list)):
        return list(zip(getattr(output, "_fields", range(len(output))), output, strict=True))
    if dataclasses.is_dataclass(output) and not isinstance(output, Ref) and not hasattr(output, "path"):
        return [(item.name, getattr(output, item.name)) for item in dataclasses.fields(output)]
    return None


def child_name(output: Any, key: Any, prefix: str, name: str) -> str:
    """The name of what a container named `name` holds at `key`; arguments as of `named_leaves`."""
    if name:
        return f"{name}.{key}"
    return f"{prefix}{key}" if isinstance(output, (tuple, list)) and isinstance(key, int) else str(key)
