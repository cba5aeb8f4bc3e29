"""A value under capture: it looks like the tensor or the number it stands for, and notes what is done with it.

It carries the value that the example inputs gave, so shapes are real while the graph stays free of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quant.graph import Attr, Ref

if TYPE_CHECKING:
    from quant.static.tracer import Tracer


class Untraceable(Exception):
    """A forward does what a graph cannot hold; the message completes "stays an island: it ..."."""


CONSTANT_ATTRIBUTES = {"dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "is_cuda", "is_sparse", "names",
                       "is_nested", "is_quantized", "is_mkldnn", "is_meta", "is_cpu", "grad_fn"}  # fmt: skip
"""Attributes of a tensor that no input of the same kind changes: read once, at capture."""


class Traced:
    """Stands for a tensor, or for an int, float or bool that was computed from one or from its shape.

    Attributes:
        _place: the node or the parameter it is the value of.
        _value: what the example inputs gave.
        _static: a number that follows from shapes alone, so that a branch on it can be guarded.
    """

    __slots__ = ("_place", "_static", "_tracer", "_value")

    def __init__(self, tracer: Tracer, place: Ref | Attr, value: Any, static: bool) -> None:
        self._tracer, self._place, self._value, self._static = tracer, place, value, static

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # isinstance(x, Tensor) and isinstance(n, int) in a user's forward answer as they would without us.
        return type(self._value)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from quant.static.traced_calls import find_tracer  # here, because that module needs Traced itself

        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is getattr(Tensor, name, None) and args:
            return find_tracer((args, kwargs)).record("method", name, args, kwargs)
        return find_tracer((args, kwargs)).record("function", func, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in CONSTANT_ATTRIBUTES:
            return getattr(self._value, name)
        if name == "ndim":
            return self._tracer.record("method", "dim", (self,), {})
        value = getattr(self._value, name)
        if not callable(value):
            return self._tracer.record("function", getattr, (self, name), {})
        tracer = self._tracer
        return lambda *args, **kwargs: tracer.record("method", name, (self, *args), kwargs)

    def __bool__(self) -> bool:
        return bool(self._tracer.concrete(self, "branches on"))

    def __index__(self) -> int:
        return operator.index(self._tracer.concrete(self, "counts by"))

    def __int__(self) -> int:
        return int(self._tracer.concrete(self, "counts by"))

    def __float__(self) -> float:
        return float(self._tracer.concrete(self, "computes in Python with"))

    def __len__(self) -> int:
        return len(range(self._tracer.record("method", "size", (self, 0), {})))

    def __iter__(self) -> Iterator[Any]:
        return iter([self[index] for index in range(len(self))])

    def __getitem__(self, key: Any) -> Any:
        return self._tracer.record("function", operator.getitem, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        raise Untraceable("writes into a part of a tensor")

    def __contains__(self, item: Any) -> bool:
        raise Untraceable("looks for a value in a tensor")

    def __hash__(self) -> int:
        # A size may be a dictionary's key, `{3: "linear", 4: "bilinear"}[x.dim()]`; a tensor is itself and no other.
        return id(self) if isinstance(self._value, Tensor) else hash(self._tracer.concrete(self, "looks up by"))

    def __repr__(self) -> str:
        return f"traced {self._value!r}"

    def __format__(self, spec: str) -> str:
        return format(self._value, spec)

    def __ceil__(self) -> Any:
        return self._tracer.record("function", math.ceil, (self,), {})

    def __floor__(self) -> Any:
        return self._tracer.record("function", math.floor, (self,), {})

    def __round__(self, digits: int | None = None) -> Any:
        return self._tracer.record("function", round, (self,) if digits is None else (self, digits), {})


def _operation(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Traced, *others: Any) -> Any:
        return self._tracer.record("function", function, (self, *others), {})

    return method


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Traced, other: Any) -> Any:
        return self._tracer.record("function", function, (other, self), {})

    return method


def _in_place(function: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Traced, other: Any) -> Any:
        chosen = function if isinstance(self._value, Tensor) else plain
        return self._tracer.record("function", chosen, (self, other), {})

    return method


ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
IN_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Each in-place operator with the one that makes a new value."""

for _name in ARITHMETIC:
    _plain = getattr(operator, f"__{_name}__")
    _changing = getattr(operator, f"__i{_name}__")
    IN_PLACE[_changing] = _plain
    setattr(Traced, f"__{_name}__", _operation(_plain))
    setattr(Traced, f"__r{_name}__", _reflected(_plain))
    setattr(Traced, f"__i{_name}__", _in_place(_changing, _plain))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert"):
    setattr(Traced, f"__{_name}__", _operation(getattr(operator, f"__{_name}__")))

_FACTORIES = ("zeros", "ones", "empty", "full", "arange", "rand", "randn", "eye", "linspace", "tensor", "as_tensor")
_TAKE_NUMBERS_FIRST = ("pow", "where", "float_power", "remainder", "xlogy", "isin", "result_type", "bitwise_and",
                       "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift")  # fmt: skip
PATCHED = {name: getattr(torch, name) for name in (*_FACTORIES, *_TAKE_NUMBERS_FIRST)}
"""Functions of torch that must not see a Traced: those that take sizes and no tensor, which would not tell us, and
those that try a number in a tensor's place. Torch's C++ asks whether that is a Tensor, is told yes (`__class__`), and
reads memory that is none."""
