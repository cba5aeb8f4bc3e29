"""Numbers that follow from sizes or are given, while a model is recorded: real ints and floats that note their uses.

They are subclasses of `int` and `float` that hold the value they had on the example inputs, so that whatever takes a
number takes them: torch, C extensions, dictionaries. What Python lets a subclass see is noted: arithmetic becomes a
call of the graph, and a comparison a guard. What it does not (`range(n)`, an index into a list) uses the value; the
recording of another size then differs, and that size is held fixed (`proof.py`). A quotient or remainder may be the
same there; it is guarded where it may have been taken so (`Recorder.rounded`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quant.capture.recorder import Recorder


class RecordedInt(int):
    """An int of a recording.

    Attributes:
        recorder: of the recording it belongs to.
        index: the node it is the value of.
        static: whether it follows from shapes and given numbers alone, so that a decision by it can be guarded.
    """

    recorder: Recorder
    index: int
    static: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (plain(self),)


class RecordedFloat(float):
    """A float of a recording; as `RecordedInt`."""

    recorder: Recorder
    index: int
    static: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (plain(self),)


NUMBERS = (RecordedInt, RecordedFloat)


def recorded(value: Any, recorder: Recorder, index: int, static: bool) -> Any:
    """A number as the value of node `index`; a bool is itself, since nothing else can be one."""
    if type(value) is int or type(value) is RecordedInt:
        found: Any = int.__new__(RecordedInt, plain(value))
    elif type(value) is float or type(value) is RecordedFloat:
        found = float.__new__(RecordedFloat, plain(value))
    else:
        return value
    found.recorder, found.index, found.static = recorder, index, static
    return found


def plain(value: Any) -> Any:
    """The number itself."""
    if type(value) is RecordedInt:
        return int.__int__(value)
    return float.__float__(value) if type(value) is RecordedFloat else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _noted(function: Callable[..., Any], *operands: Any) -> Any:
    """The result of an arithmetic function, noted by the recorder of its first recorded operand."""
    value = function(*map(plain, operands))
    owner = next(one for one in operands if type(one) in NUMBERS)
    return owner.recorder.number(function, operands, value)


def _binary(function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        if not _is_number(other):
            # Of a tensor, torch's reflected operator; of a list, its repetition, which reads the number.
            if isinstance(other, (list, tuple, str, bytes)):
                self.recorder.decides(self, "counts by")
            return NotImplemented
        return _noted(function, other, self) if reflected else _noted(function, self, other)

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: _noted(function, self)


def _comparison(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        verdict = function(plain(self), plain(other))
        self.recorder.compares(function, self, other, verdict)
        return verdict

    return method


def _read(convert: Callable[[Any], Any], what: str) -> Callable[..., Any]:
    """A conversion whose result cannot be followed: the number is held to its value."""

    def method(self: Any, *args: Any) -> Any:
        self.recorder.decides(self, what)
        return convert(plain(self), *args)

    return method


def _shown(convert: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: convert(plain(self), *args)


def _rounded(self: Any, digits: Any = None) -> Any:
    return _noted(round, self) if digits is None else _noted(round, self, digits)


def _divmod(self: Any, other: Any) -> Any:
    return (self // other, self % other) if _is_number(other) else NotImplemented


def _install(kind: type) -> None:
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        function = getattr(operator, f"__{name}__")
        setattr(kind, f"__{name}__", _binary(function, reflected=False))
        setattr(kind, f"__r{name}__", _binary(function, reflected=True))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(kind, f"__{name}__", _comparison(getattr(operator, f"__{name}__")))
    methods: dict[str, Any] = {
        "__neg__": _unary(operator.neg),
        "__pos__": _unary(operator.pos),
        "__abs__": _unary(operator.abs),
        "__ceil__": _unary(math.ceil),
        "__floor__": _unary(math.floor),
        "__trunc__": _unary(math.trunc),
        "__round__": _rounded,
        "__divmod__": _divmod,
        "__bool__": _read(bool, "branches on"),
        "__int__": _read(int, "counts by"),
        "__float__": _read(float, "computes in Python with"),
        "__hash__": _read(hash, "looks up by"),
        "__repr__": _shown(repr),
        "__str__": _shown(str),
        "__format__": _shown(format),
        "__copy__": lambda self: self,
        "__deepcopy__": lambda self, memo: self,
    }
    for name, method in methods.items():
        setattr(kind, name, method)


_install(RecordedInt)
_install(RecordedFloat)


def _bits(name: str) -> Callable[..., Any]:
    return _read(getattr(int, name), "counts by")


for _name in ("__index__", "bit_length", "__lshift__", "__rshift__", "__and__", "__or__", "__xor__", "__invert__"):
    setattr(RecordedInt, _name, _bits(_name))
setattr(RecordedFloat, "is_integer", _read(float.is_integer, "branches on"))  # noqa: B010 - as the others
