"""The form of an island's output: everything except its tensors and numbers, as a text that a guard compares.

The caller of an island may branch on more than tensors: on None, a string or an enum, on the number of parts and their
classes.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from quant.runtime.objects import attributes_of, items_of

COUNTED = (tuple, list, dict)
"""Containers whose numbers are values of the graph; numbers in other objects belong to the form."""

LITERALS = (bool, int, float, complex, str, bytes, type(None), slice, range, type(Ellipsis), torch.dtype, torch.device,
            torch.layout, torch.memory_format, torch.Size)  # fmt: skip
"""Classes of constants with unequal texts for unequal values."""


def form_of(value: Any) -> str:
    """The form of a module's output; two outputs with the same form differ at most in tensors and numbers."""
    return _form(value, (), numbers=True)


def is_literal(value: Any) -> bool:
    """Whether a value is immutable and determined by its form."""
    return isinstance(value, (*LITERALS, enum.Enum, type))


def _form(value: Any, around: tuple[int, ...], *, numbers: bool) -> str:
    kind = type(value)
    if isinstance(value, Tensor) or (numbers and kind in (int, float)):
        return _name(kind)
    if isinstance(value, enum.Enum):
        return f"{_name(kind)}.{value.name}"
    if isinstance(value, LITERALS):
        return repr(value)
    if isinstance(value, type):
        return _name(value)
    if id(value) in around:  # objects that hold each other
        return "..."
    inside, items, attributes = (*around, id(value)), items_of(value), attributes_of(value)
    parts = [f".{name}={_form(one, inside, numbers=False)}" for name, one in attributes.items()]
    if items is not None:
        pairs = items.items() if isinstance(items, dict) else ((None, one) for one in items)
        within = numbers and kind in COUNTED
        parts += [("" if key is None else f"{key!r}: ") + _form(one, inside, numbers=within) for key, one in pairs]
    return f"{_name(kind)}({', '.join(parts)})"


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
