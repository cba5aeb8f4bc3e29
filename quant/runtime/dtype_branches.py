"""Forwards that compare dtypes: around the layers of a widened half model they find float32, and may go another way."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator

from torch import nn

COMPARES = frozenset({"COMPARE_OP", "CONTAINS_OP", "IS_OP"})
TYPES = frozenset({"dtype", "float16", "bfloat16", "half", "float32", "is_floating_point"})
NEAR = 6
"""How many instructions lie between a dtype and its comparison with a few constants."""


def comparing_dtypes(root: nn.Module) -> list[str]:
    """The names of the modules in a module, which may be itself, whose methods compare dtypes; '' is the module."""
    known: dict[type, bool] = {}
    names = []
    for name, module in root.named_modules():
        kind = type(module)
        if kind not in known:
            known[kind] = any(map(_compares, _codes(kind)))
        if known[kind]:
            names.append(name)
    return names


def _codes(kind: type) -> Iterator[types.CodeType]:
    """The code of a class's methods, and of those above it, but for torch's."""
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] in ("torch", "quant", "builtins"):
            continue
        for method in vars(one).values():
            code = getattr(method, "__code__", None)
            if isinstance(code, types.CodeType):
                yield from _nested(code)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _compares(code: types.CodeType) -> bool:
    if TYPES.isdisjoint(code.co_names):
        return False
    last = -NEAR - 1
    for place, one in enumerate(dis.get_instructions(code)):
        if isinstance(one.argval, str) and one.argval in TYPES:
            last = place
        elif one.opname in COMPARES and place - last <= NEAR:
            return True
    return False
