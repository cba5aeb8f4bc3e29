"""Inspects the code of a forward and of its helpers before it runs: the names they use, and certain operations.

Helpers are the functions of the same file that it names, and the module's own methods. Deeper calls are not followed,
and the code of Python's library, torch and numpy is not inspected.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

ASKS_CLASS = {"isinstance", "issubclass", "type", "__class__"}
TEXTS = frozenset({"hex", "oct", "bin", "chr", "dumps"})
"""Functions that format an int as text."""
INT_IN_TEXT = re.compile(r"%[-+ #0]*[0-9*]*(\.[0-9*]+)?[diouxXc]")
PERCENT = {("BINARY_OP", "%"), ("BINARY_OP", "%="), ("BINARY_MODULO", ""), ("INPLACE_MODULO", "")}
FOREIGN = {*sys.stdlib_module_names, *sys.builtin_module_names, "torch", "numpy"}
"""Packages whose code is not inspected."""


def looks_at_class(module: nn.Module, forward: Callable[..., Any], child: nn.Module) -> bool:
    """Whether a forward checks for a class of the child's, which an int8 layer would not pass."""
    function = function_of(forward)
    if function is None:
        return False
    for one in (function, *_helpers(module, function)):
        names = names_in(one.__code__)
        if names.isdisjoint(ASKS_CLASS) and not _matches_classes(one.__code__):
            continue
        classes = [one.__globals__.get(name, getattr(nn, name, None)) for name in names]
        if any(isinstance(kind, type) and kind is not nn.Module and isinstance(child, kind) for kind in classes):
            return True
    return False


def named_in(root: nn.Module, attributes: Collection[str]) -> str:
    """The first of `attributes` that the code of a forward within `root` names; '' where none does."""
    for module in root.modules() if attributes else ():
        for one in own_functions(module, module.forward):
            texts = {constant for constant in one.__code__.co_consts if isinstance(constant, str)}  # of getattr
            asked = (names_in(one.__code__) | texts).intersection(attributes)
            if asked:
                return min(asked)
    return ""


def asks_for_gradients(root: nn.Module) -> bool:
    """Whether the code of a forward within `root` calls `is_grad_enabled`."""
    functions = (one for module in root.modules() for one in own_functions(module, module.forward))
    return any("is_grad_enabled" in names_in(one.__code__) for one in functions)


def writes_texts(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a forward formats ints in C (`'%d' % n`, `hex(n)`), which a RecordedInt does not notice."""
    return any(_writes_texts(one.__code__) for one in own_functions(module, forward))


@functools.lru_cache(maxsize=4096)
def _writes_texts(code: types.CodeType) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return not TEXTS.isdisjoint(code.co_names) or _formats_ints(code) or any(map(_writes_texts, inner))


def _formats_ints(code: types.CodeType) -> bool:
    """Whether code has a `%` format with a place for an int, other than in the message of an error."""
    if not any(isinstance(constant, str) and INT_IN_TEXT.search(constant) for constant in code.co_consts):
        return False
    raised = False
    for instruction in reversed(list(dis.get_instructions(code))):
        if instruction.opname == "RAISE_VARARGS":
            raised = True
        elif instruction.opname.startswith(("STORE", "RETURN", "JUMP", "POP_JUMP", "POP_TOP")):
            raised = False
        elif not raised and (instruction.opname, instruction.argrepr) in PERCENT:
            return True
    return False


def own_functions(module: nn.Module, forward: Callable[..., Any]) -> list[types.FunctionType]:
    """A module's forward and its helpers; empty where the forward is of torch or another FOREIGN package."""
    function = function_of(forward)
    if function is None or (function.__module__ or "").partition(".")[0] in FOREIGN:
        return []
    return [function, *_helpers(module, function)]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The global names and attributes that code, and functions inside it, look up."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def own_classes(kind: type) -> Iterator[type]:
    return (one for one in kind.__mro__ if one.__module__.partition(".")[0] not in FOREIGN)


def _helpers(module: nn.Module, function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The functions of the same file, and the methods of the module, that a function names."""
    for name in names_in(function.__code__):
        of_class = next((vars(kind)[name] for kind in type(module).__mro__ if name in vars(kind)), None)
        own = vars(module).get(name, of_class)
        for value in (function.__globals__.get(name), own):
            helper = function_of(getattr(value, "fget", None) or getattr(value, "__func__", None) or value)
            if helper is not None and helper is not function and helper.__globals__ is function.__globals__:
                yield helper


def function_of(value: Any) -> types.FunctionType | None:
    """The Python function inside a method, partial or wrapper; None where there is none."""
    if value is None or isinstance(value, (types.ModuleType, str, int)):  # the most frequent kinds
        return None
    try:
        value = inspect.unwrap(value)
    except (AttributeError, ValueError):
        return None
    value = getattr(value, "func", value)
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


def _matches_classes(code: types.CodeType) -> bool:
    return any(instruction.opname == "MATCH_CLASS" for instruction in dis.get_instructions(code))
