"""The fingerprint of a model: a hash of all that its forward may depend on, except the values of tensors.

The programs in a file are used for a float model with the fingerprint of the one that was converted. With any other
fingerprint the model is captured, and its calls are compared one by one.

For each module by its name, the hash covers its class, the shapes and dtypes of its tensors, its plain attributes
(numbers, strings, containers and objects of these), and the code of its forward with all methods and functions that it
names, of any library except torch and Python's. It does not cover names that begin with an underscore, and attributes
read by computed names. Code is hashed as compiled, so the fingerprint depends on the version of Python.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.runtime.programs import RESERVED

FOREIGN = frozenset({*sys.stdlib_module_names, *sys.builtin_module_names, "torch", "numpy"})
"""Packages whose code is not covered."""

MODULE_STATE = frozenset({*vars(nn.Module()), "forward"})
"""Attributes that every module has; a forward set on a module is covered as code."""

DEPTH = 4
"""Depth of objects within objects."""

LONGEST = 4096
"""Longest container that is covered by its items; of longer ones the length is."""

MOST = 200_000
"""Most attribute values in total; of further ones the class is covered."""


def fingerprint(model: nn.Module) -> str:
    """The fingerprint of a float model; a prepared model has that of its float model.

    Returns:
        the hash in hexadecimal; '' where an object of the user's cannot be inspected, which equals no other.
    """
    seen = _Seen()
    try:
        for name, module in model.named_modules(remove_duplicate=False):
            if RESERVED not in name.split("."):
                seen.add(name, *_of_module(module, seen))
    except Exception:  # a class of the user's may raise any error on access to an attribute
        return ""
    return seen.digest()


class _Seen:
    """The hash up to now, and what it covers.

    Attributes:
        code: the functions covered, so that each is covered once.
        values: number of attribute values covered.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256(repr(sys.version_info[:2]).encode())
        self.code: set[types.CodeType] = set()
        self.values = 0

    def add(self, *parts: object) -> None:
        """Add texts."""
        self._hash.update(repr(parts).encode())

    def digest(self) -> str:
        """The hash of all texts added."""
        return self._hash.hexdigest()


def _of_module(module: nn.Module, seen: _Seen) -> Iterator[object]:
    yield _name(type(module))
    for store in (module._parameters, module._buffers):
        yield [(name, _tensor(value)) for name, value in store.items()]
    if isinstance(module, torch.jit.ScriptModule):
        yield str(module.graph)
        return
    own = {name: value for name, value in vars(module).items() if _counts(name)}
    yield [(name, _plain(own[name], seen, DEPTH)) for name in sorted(own)]
    _add_code(_forward(module), type(module), seen)


def _counts(name: str) -> bool:
    return not name.startswith("_") and name not in MODULE_STATE


def _forward(module: nn.Module) -> Any:
    """The user's forward; for a prepared module, the one that its runner replaces."""
    runner = module._modules.get(RESERVED) if RESERVED in module._modules else None
    own = vars(module).get("forward") if runner is None else getattr(runner, "own_forward", None)
    waiting: Any = getattr(own, "__self__", None)
    if hasattr(waiting, "own_forward"):  # a part of a prepared model that was not called by itself yet
        own = waiting.own_forward
    return type(module).forward if own is None else own


def _tensor(value: Tensor | None) -> object:
    if value is None or nn.parameter.is_lazy(value):
        return value is None
    return tuple(value.shape), str(value.dtype)


def _name(kind: type) -> str:
    """A class's name without its module, which is `__main__` in one script and imported by another."""
    return kind.__qualname__


def _plain(value: Any, seen: _Seen, depth: int) -> object:
    """A value as numbers and strings; an object as its class and attributes."""
    seen.values += 1
    if isinstance(value, (list, tuple, set, frozenset, Mapping)) and len(value) > LONGEST:
        return _name(type(value)), len(value)
    if seen.values > MOST:
        return _name(type(value))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return type(value).__name__, str(value)
    if isinstance(value, enum.Enum):
        return _name(type(value)), value.name
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, type):
        return _name(value)
    if _function(value) is not None:
        _add_code(value, None, seen)
        return "function"
    if depth == 0 or isinstance(value, nn.Module):
        return _name(type(value))
    if isinstance(value, Mapping):
        pairs = [(_plain(key, seen, 0), _plain(item, seen, depth - 1)) for key, item in value.items()]
        return _name(type(value)), pairs
    if isinstance(value, (list, tuple)):
        return _name(type(value)), [_plain(item, seen, depth - 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return _name(type(value)), sorted(repr(_plain(item, seen, 0)) for item in value)
    own = getattr(value, "__dict__", {})
    return _name(type(value)), [(name, _plain(own[name], seen, depth - 1)) for name in sorted(own) if name[:1] != "_"]


def _function(value: Any) -> types.FunctionType | None:
    """The Python function in a method, a partial function, a property or a wrapper."""
    for name in ("fget", "func", "__func__", "__wrapped__"):
        if not isinstance(value, (types.FunctionType, types.ModuleType, type)) and hasattr(type(value), "__get__"):
            value = getattr(value, name, value)
    if isinstance(value, functools.partial):
        value = value.func
    while isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, types.FunctionType) else None


def _add_code(value: Callable[..., Any] | None, kind: type | None, seen: _Seen) -> None:
    """Add a function's code and that of what it names; `kind` is the class whose methods it may name."""
    function = _function(value)
    if function is None or (function.__module__ or "").partition(".")[0] in FOREIGN:
        return
    code = function.__code__
    if code in seen.code:
        return
    seen.code.add(code)
    seen.add(function.__qualname__, *_of_code(code), _plain(function.__defaults__, seen, 1))
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        seen.add(name, _plain(_content(cell), seen, 1))
    for name in sorted(_names(code)):
        if name in function.__globals__:
            _add_named(name, function.__globals__[name], seen)
        for one in kind.__mro__ if kind is not None else ():
            if name in vars(one) and one.__module__.partition(".")[0] not in FOREIGN:
                _add_code(vars(one)[name], kind, seen)


def _add_named(name: str, value: Any, seen: _Seen) -> None:
    """Add the value of a global name: a function's code, a class's methods, or a plain value."""
    if isinstance(value, types.ModuleType):
        return
    if isinstance(value, type):
        if value.__module__.partition(".")[0] not in FOREIGN:
            for method in vars(value).values():
                _add_code(method, value, seen)
        return
    seen.add(name, _plain(value, seen, 1))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put in yet
        return None


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """The global names and attributes that code, and functions inside it, look up."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _of_code(code: types.CodeType) -> Iterator[object]:
    """The instructions and constants of code, without line numbers."""
    yield code.co_code.hex()
    yield list(code.co_names), code.co_varnames, code.co_freevars, code.co_flags
    for constant in code.co_consts:
        yield list(_of_code(constant)) if isinstance(constant, types.CodeType) else _constant(constant)


def _constant(value: object) -> str:
    """A constant as text; sets in a fixed order."""
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
