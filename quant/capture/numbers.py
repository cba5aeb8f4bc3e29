"""Numbers that depend on sizes or are arguments, while a model is recorded: ints and floats that note their uses.

They are subclasses of `int` and `float` with the value of the example inputs, so that torch, C extensions and
dictionaries accept them. Uses that a subclass can intercept are noted: arithmetic becomes a call of the graph, and a
comparison, text or bit operation becomes a guard. Other uses (`range(n)`, an index into a list) see the plain value;
the recording of another size then differs, and that size is held fixed (`proof.py`). Texts formatted in C
(`'%d' % n`) are detected in the forward's code (`forward_code.py`). A quotient or remainder may be the same for another
size, so it is guarded where it may have been used unseen (`Tape.rounded`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quant.runtime.trees import leaves, map_leaves

if TYPE_CHECKING:
    from quant.capture.tape import Tape


class RecordedInt(int):
    """An int of a recording.

    Attributes:
        recorder: the tape of the recording it belongs to.
        index: the node whose value it is.
        static: whether it depends on shapes and given numbers only, so that a branch on it can be guarded.
    """

    recorder: Tape
    index: int
    static: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (_held("counts by", plain, self),)


class RecordedFloat(float):
    """A float of a recording, with the attributes of `RecordedInt`."""

    recorder: Tape
    index: int
    static: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (_held(COMPUTES, plain, self),)


NUMBERS = (RecordedInt, RecordedFloat)
SEQUENCES = (list, tuple, str, bytes, bytearray)
COMPUTES = "computes in Python with"


def recorded(value: Any, recorder: Tape, index: int, static: bool) -> Any:
    """A number as the value of node `index`; a bool stays plain, since bool has no subclasses."""
    if type(value) is int or type(value) is RecordedInt:
        number: Any = int.__new__(RecordedInt, plain(value))
    elif type(value) is float or type(value) is RecordedFloat:
        number = float.__new__(RecordedFloat, plain(value))
    else:
        return value
    number.recorder, number.index, number.static = recorder, index, static
    return number


def plain(value: Any) -> Any:
    """The plain number."""
    if type(value) is RecordedInt:
        return int.__int__(value)
    return float.__float__(value) if type(value) is RecordedFloat else value


def plain_numbers(tree: Any) -> Any:
    """Arguments with plain numbers in place of recorded ones; the same object where there are none."""
    if any(type(leaf) in NUMBERS for leaf in leaves(tree)):
        return map_leaves(plain, tree)
    return tree


SYMBOLIC = (torch.SymInt, torch.SymFloat)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _noted(function: Callable[..., Any], *operands: Any) -> Any:
    """A function whose result is noted by the recorder of its first recorded operand."""
    value = function(*map(plain, operands))
    owner = next(one for one in operands if type(one) in NUMBERS)
    return owner.recorder.number(function, operands, value)


def _binary(function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    def method(self: Any, other: Any, modulus: Any = None) -> Any:
        if modulus is not None:
            return _held("counts by", pow, self, other, modulus)
        if isinstance(other, SYMBOLIC):  # sizes of jagged tensors, which know no subclass of int
            return function(other, plain(self)) if reflected else function(plain(self), other)
        if not _is_number(other):
            # Of a tensor, torch's reflected operator; of a list its repetition, of a fraction its own arithmetic.
            if not isinstance(other, Tensor):
                self.recorder.decides(self, "counts by" if isinstance(other, SEQUENCES) else COMPUTES)
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


def _held(what: str, function: Callable[..., Any], *operands: Any) -> Any:
    """A function whose result cannot be recorded, so that its operands are held to their values."""
    for one in operands:
        if type(one) in NUMBERS:
            one.recorder.decides(one, what)
    return function(*map(plain, operands))


def _read(convert: Callable[..., Any], what: str) -> Callable[..., Any]:
    return lambda *operands: _held(what, convert, *operands)


def _rounded(self: Any, digits: Any = None) -> Any:
    return _noted(round, self) if digits is None else _noted(round, self, digits)


def _divmod(self: Any, other: Any) -> Any:
    return (self // other, self % other) if _is_number(other) else NotImplemented


def _divmod_reflected(self: Any, other: Any) -> Any:
    return (other // self, other % self) if _is_number(other) else NotImplemented


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
        "__rdivmod__": _divmod_reflected,
        "__bool__": _read(bool, "branches on"),
        "__int__": _read(int, "counts by"),
        "__float__": _read(float, COMPUTES),
        "__hash__": _read(hash, "looks up by"),
        "__repr__": _read(repr, "writes a text with"),
        "__str__": _read(str, "writes a text with"),
        "__format__": _read(format, "writes a text with"),
        "as_integer_ratio": _read(kind.as_integer_ratio, COMPUTES),  # type: ignore[attr-defined]
        "conjugate": lambda self: self,
        "real": property(lambda self: self),
        "__copy__": lambda self: self,
        "__deepcopy__": lambda self, memo: self,
    }
    for name, method in methods.items():
        setattr(kind, name, method)


_install(RecordedInt)
_install(RecordedFloat)


for _name in ("lshift", "rshift", "and", "or", "xor"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(RecordedInt, _method, _read(getattr(int, _method), "counts by"))
for _method in ("__index__", "__invert__", "bit_length", "bit_count", "to_bytes"):
    setattr(RecordedInt, _method, _read(getattr(int, _method), "counts by"))
RecordedInt.numerator = property(lambda self: self)  # type: ignore[assignment]
for _method in ("is_integer", "hex"):
    setattr(RecordedFloat, _method, _read(getattr(float, _method), "branches on"))
