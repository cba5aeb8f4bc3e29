"""Tables of the functions that write steps, which others can add to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def registering(table: dict[str, F], *names: str) -> Callable[[F], F]:
    """A decorator that puts a function into a table under some names.

    Raises:
        ValueError: another function stands under one of them already.
    """

    def register(function: F) -> F:
        for name in names:
            known = table.setdefault(name, function)
            if known is not function:
                raise ValueError(f"export_onnx: expected one function to write '{name}', "
                                 f"{known.__module__}.{getattr(known, '__name__', known)} does")  # fmt: skip
        return function

    return register
