"""Pictures of whatever a forward gives out, and how two of them are compared.

A picture is taken at once, since later calls may write into what was given out. It keeps types, structure and values,
also of objects of classes that nobody knows, with cycles.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SMALL = 0.1
"""Size of values below which an error is measured against this instead of against them."""

LITERAL = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, type, range, slice)


@dataclass(frozen=True)
class Values:
    """The numbers of a tensor, an array or a float."""

    kind: str
    dtype: str
    values: Tensor


@dataclass(frozen=True)
class Literal:
    """What must be equal: its type and how it prints."""

    kind: str
    text: str


@dataclass(frozen=True)
class Tree:
    """Anything that holds something: a container, or an object with its attributes."""

    kind: str
    children: tuple[tuple[str, Any], ...]


def picture(thing: Any, seen: dict[int, int] | None = None) -> Any:
    """What `thing` is now: a Values, a Literal or a Tree."""
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    if isinstance(thing, Tensor):
        return _of_tensor(kind, thing)
    if isinstance(thing, (np.ndarray, np.generic)):
        return Values(kind, str(thing.dtype), torch.from_numpy(np.array(thing)))
    if isinstance(thing, (float, complex)):
        return Values(kind, kind, torch.tensor(thing, dtype=torch.complex128 if isinstance(thing, complex) else None))
    if isinstance(thing, LITERAL):
        return Literal(kind, repr(thing))
    if isinstance(thing, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, nn.Module)):
        return Literal(kind, getattr(thing, "__qualname__", ""))
    seen = {} if seen is None else seen
    if id(thing) in seen:
        return Literal("seen before", str(seen[id(thing)]))
    seen[id(thing)] = len(seen)
    return Tree(kind, tuple((name, picture(child, seen)) for name, child in _children(thing)))


def _of_tensor(kind: str, tensor: Tensor) -> Any:
    dtype = str(tensor.dtype)
    if tensor.is_nested:
        return Tree(kind, tuple((str(i), picture(part)) for i, part in enumerate(tensor.unbind())))
    if tensor.is_meta:
        return Literal(kind, f"meta {dtype} {tuple(tensor.shape)}")
    if tensor.layout != torch.strided:
        kind, tensor = f"{kind} ({tensor.layout})", tensor.to_dense()
    with torch.no_grad():
        return Values(kind, dtype, tensor.detach().as_subclass(Tensor).clone().resolve_conj().resolve_neg())


def _children(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, types.GeneratorType):
        thing = list(thing)
    if isinstance(thing, collections.abc.Mapping):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, (set, frozenset)):
        yield from ((f"[{i}]", value) for i, value in enumerate(sorted(thing, key=repr)))
    elif isinstance(thing, (list, tuple, collections.deque, collections.UserList)):
        yield from ((f"[{i}]", value) for i, value in enumerate(thing))
    names = [field.name for field in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
    slots = [name for kind in type(thing).__mro__ for name in _slots(kind) if hasattr(thing, name)]
    for name in dict.fromkeys([*names, *slots, *getattr(thing, "__dict__", ())]):
        yield f".{name}", getattr(thing, name)


def _slots(kind: type) -> tuple[str, ...]:
    found = kind.__dict__.get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


@dataclass(frozen=True)
class Difference:
    """Where two pictures differ: `wrong` numbers, or another `structure`."""

    kind: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: output{self.where} {self.what}"


@dataclass
class Comparison:
    """How the picture of a quantised model's output compares with float's.

    Attributes:
        floor, integers: as in Case.
        differences: found so far.
        lowest: the smallest signal to noise ratio seen, in dB.
    """

    floor: float = 20.0
    integers: str = "equal"
    differences: list[Difference] = dataclasses.field(default_factory=list)
    lowest: float = float("inf")

    def compare(self, expected: Any, found: Any, where: str = "") -> None:
        """Add the differences of two pictures."""
        if type(expected) is not type(found) or expected.kind != found.kind:
            self._differ("structure", where, f"is {_name(found)}, in float {_name(expected)}")
        elif isinstance(expected, Literal):
            if expected.text != found.text:
                self._differ("wrong", where, f"is {found.text}, in float {expected.text}")
        elif isinstance(expected, Tree):
            names, others = [name for name, _ in expected.children], [name for name, _ in found.children]
            if names != others:
                self._differ("structure", where, f"has {others}, in float {names}")
                return
            for (name, one), (_, other) in zip(expected.children, found.children, strict=True):
                self.compare(one, other, where + name)
        else:
            self._compare_values(expected, found, where)

    def _compare_values(self, expected: Values, found: Values, where: str) -> None:
        one, other = expected.values, found.values
        if expected.dtype != found.dtype or one.shape != other.shape:
            self._differ(
                "structure",
                where,
                f"is {found.dtype} {tuple(other.shape)}, in float {expected.dtype} {tuple(one.shape)}",
            )
        elif one.is_floating_point() or one.is_complex():
            self._compare_reals(one, other, where)
        else:
            share = float((one != other).double().mean()) if one.numel() else 0.0
            if share > (0.25 if self.integers == "mostly" else 0.0):
                self._differ("wrong", where, f"has {share:.0%} other integers")

    def _compare_reals(self, one: Tensor, other: Tensor, where: str) -> None:
        one, other = _doubles(one), _doubles(other)
        finite = one.isfinite()
        if not torch.equal(one[~finite].nan_to_num(7.0), other[~finite].nan_to_num(7.0)) or not bool(
            other[finite].isfinite().all()
        ):
            self._differ("wrong", where, "has NaN or inf in other places")
            return
        if not bool(finite.any()):
            return
        signal = one[finite].square().mean().clamp(min=SMALL**2)
        error = (one - other)[finite].square().mean().clamp(min=1e-20)
        sqnr = float(10 * torch.log10(signal / error))
        self.lowest = min(self.lowest, sqnr)
        if sqnr < self.floor:
            self._differ("wrong", where, f"has {sqnr:.1f} dB, expected {self.floor:.0f}")

    def _differ(self, kind: str, where: str, what: str) -> None:
        self.differences.append(Difference(kind, where, what))


def _doubles(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()


def _name(one: Any) -> str:
    return f"{one.kind} {one.text}" if isinstance(one, Literal) else str(one.kind)
