"""The terms in which operators describe native calls: lines of a plan (`kernels/reference_plan.py`), or why not.

An operator with a kernel needs nothing here: the kernel's call is its line, where the plan's table has the kernel. A
view (`lower` gives `SameCall`) gives its lines by `Operator.plan`. A float call between integers is planned where its
family's file says how (`plans_reals`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from quant.graph import Kind, Node
from quant.kernels.reference_plan import Register
from quant.ops.call import called
from quant.runtime.chained_lines import BEFORE as BEFORE
from quant.runtime.chained_lines import Lines as Lines
from quant.runtime.chained_lines import before as before
from quant.runtime.module_call import ModuleCall
from quant.runtime.names import attribute
from quant.runtime.trees import Attr, Ref, leaves


class Unplanned(Exception):
    """A call has no lines in a plan and runs by itself; the message says why."""


@dataclass(frozen=True)
class Symbol:
    """A value that is not a tensor, described by a tensor's shape; it takes no line.

    Attributes:
        source: the tensor's register.
    """

    source: int


@dataclass(frozen=True)
class ShapeOf(Symbol):
    """The whole shape."""


@dataclass(frozen=True)
class NumberOf(Symbol):
    """A number that follows from sizes.

    Attributes:
        number: a size of a plan (`kernels/plan_sizes.py`) over registers.
    """

    number: Any


@dataclass(frozen=True)
class PlacesOf(Symbol):
    """The integers from 0 to a size that is a number as in `NumberOf`, as an embedding of positions reads them."""

    number: Any


@dataclass(frozen=True)
class QuotientOf(Symbol):
    """The true quotient of two numbers that follow from sizes, which is rounded next."""

    left: Any
    right: Any


@dataclass(frozen=True)
class RankOf(Symbol):
    """The number of dimensions, or a value derived from it."""


@dataclass(frozen=True)
class RankCheck(Symbol):
    """A guard on the number of dimensions."""


@dataclass(frozen=True)
class PartsOf(Symbol):
    """A tuple of parts of a tensor.

    Attributes:
        dim: along which it is cut.
        count: how many parts there are; for `chunk`, how many are asked for.
    """

    dim: int
    count: int

    def part(self, index: int) -> Lines:
        """One part."""
        raise NotImplementedError

    def check(self) -> Lines:
        """Lines that refuse to build a plan where the number of parts differs."""
        raise NotImplementedError


@dataclass(frozen=True)
class TupleOf(PartsOf):
    """A tuple of values that lines have written.

    Attributes:
        items: registers, or tuples again.
    """

    items: tuple[Register | TupleOf, ...]

    def part(self, index: int) -> Lines | TupleOf:  # type: ignore[override]
        if not -self.count <= index < self.count:
            raise Unplanned("there is no such part")
        item = self.items[index]
        return [("same", {"x": item})] if isinstance(item, Register) else item

    def check(self) -> Lines:
        return [("same", {"x": Register(self.source)})]


@dataclass(frozen=True)
class Opened:
    """A call of a module that gives a tuple, whose items its lines write.

    Attributes:
        call: the module's lines.
        parts: what it gives.
    """

    call: ModuleCall
    parts: TupleOf


@dataclass(frozen=True)
class CountOf(Symbol):
    """The length of a tuple of parts."""

    parts: PartsOf


Planned: TypeAlias = "Lines | Symbol | ModuleCall | Opened"


class Values(Protocol):
    """The values of a run of instructions that becomes one native call (`static/native_forms.py`)."""

    def tensor(self, value: Ref) -> Register:
        """A tensor, float32 or uint8; raises Unplanned for anything else."""

    def indices(self, value: Ref) -> Register:
        """A tensor of int64; raises Unplanned for anything else."""

    def holds_bytes(self, value: Ref) -> bool:
        """Whether it is a tensor of numbers from 0 to 255 or of booleans, in the user's own calls."""

    def constant(self, value: Attr) -> Attr:
        """A float32 parameter or buffer that no call of the graph writes to; raises Unplanned for anything else."""

    def symbol(self, value: Ref) -> Symbol | None:
        """The content of a register that holds no tensor; None where it is unknown."""

    def size(self, index: int) -> Symbol | None:
        """The same for a float value of the graph."""

    def shape(self, register: Register) -> tuple[int, ...]:
        """The shape of a tensor, as captured."""

    def captured_shape(self, index: int) -> tuple[int, ...]:
        """The same, for lines that hold for any number of dimensions or refuse others themselves."""

    def dtype(self, register: Register) -> torch.dtype | None:
        """The dtype of a value, as captured; None where it is no tensor."""


@dataclass
class PlanCall:
    """A captured call as plans read it, with registers for its arguments.

    Attributes:
        out: the register of its result.
        args, kwargs: nested, with Ref to registers, or constants.
        rescaled: as in `SameCall`, of a concatenation.
        moves_indices: whether it is a view of int64, which is its first operand then.
    """

    values: Values
    node: Node
    root: nn.Module
    out: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rescaled: dict[int, tuple[int, float, int]] = field(default_factory=dict)
    moves_indices: bool = False

    @property
    def name(self) -> str:
        """The name of what it calls, for messages."""
        return called(self.node, self.root)

    @property
    def module(self) -> nn.Module | None:
        """The module that it calls; None where it calls none."""
        return attribute(self.root, self.node.target) if self.node.kind is Kind.MODULE else None

    def argument(self, place: int, name: str) -> Any:
        """The argument at `place` or called `name`; None where there is none."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)

    def tensor(self, place: int = 0, name: str = "input") -> Register:
        """An activation among the arguments."""
        value = self.argument(place, name)
        if not isinstance(value, Ref):
            raise Unplanned("its operand is no activation")
        return self.values.indices(value) if self.moves_indices and place == 0 else self.values.tensor(value)

    def indices(self, place: int = 0, name: str = "input") -> Register:
        """A tensor of int64 among the arguments."""
        value = self.argument(place, name)
        if not isinstance(value, Ref):
            raise Unplanned("its indices are no activation")
        return self.values.indices(value)

    def sized(self, place: int, name: str) -> Register:
        """An activation or a tensor of int64 among the arguments, of which the shape alone is read."""
        try:
            return self.indices(place, name)
        except Unplanned:
            return self.tensor(place, name)

    def real(self, place: int, name: str) -> Register | Attr:
        """A float32 operand: an activation, or a parameter or buffer of the model."""
        value = self.argument(place, name)
        return self.values.constant(value) if isinstance(value, Attr) else self.tensor(place, name)

    def symbol(self) -> Symbol | None:
        """The content of the first argument, where it is no tensor."""
        value = self.argument(0, "input")
        return self.values.symbol(value) if isinstance(value, Ref) else None

    def setting(self, place: int, name: str, default: Any = None) -> Any:
        """An argument that is no activation."""
        value = self.argument(place, name)
        return default if value is None else fixed(name, value)

    def number(self, value: Any) -> Any:
        """An int among the arguments, or a number that follows from sizes, as plans have it; None for anything else."""
        if isinstance(value, Ref):
            known = self.values.symbol(value)
            return known.number if isinstance(known, NumberOf) else None
        return int(value) if isinstance(value, int) else None

    def size(self, value: Any) -> Any:
        """A size among an operator's settings, as plans have it: an int, or arithmetic of sizes of registers."""
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        known = self.values.size(value.index) if isinstance(value, Ref) else None
        if not isinstance(known, NumberOf):
            raise Unplanned("its shape is computed at run time")
        return known.number


def fixed(name: str, value: Any) -> Any:
    """`value`, a setting that must not contain an activation, nor a tensor of the model's among numbers."""
    for leaf in leaves(value):
        if isinstance(leaf, Ref) or (isinstance(leaf, Attr) and leaf is not value):
            raise Unplanned(f"its {name} is computed at run time")
    return value


def integer(name: str, value: Any) -> int:
    """`value`, a setting that must be one integer."""
    if not isinstance(fixed(name, value), int) or isinstance(value, bool):
        raise Unplanned(f"its {name} is {value!r}, expected an integer")
    return int(value)
