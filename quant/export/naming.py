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

    def inside(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
        for key, value in pairs:
            yield from named_leaves(value, prefix, f"{name}.{key}" if name else str(key))

    if isinstance(output, Result):
        yield from named_leaves(output.value, prefix, name)
    elif isinstance(output, Instance):
        yield from inside((output.attributes if output.items is None else dict(output.items)).items())
    elif isinstance(output, Mapping):
        yield from inside(output.items())
    elif isinstance(output, (tuple, list)):
        places = [str(place) if name else f"{prefix}{place}" for place in range(len(output))]
        yield from inside(zip(getattr(output, "_fields", places), output, strict=True))
    elif dataclasses.is_dataclass(output) and not isinstance(output, Ref) and not hasattr(output, "path"):
        yield from inside((item.name, getattr(output, item.name)) for item in dataclasses.fields(output))
    elif output is not None:
        yield name or "output", output
