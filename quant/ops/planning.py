"""What operators say of native calls: lines of a plan's text (`kernels/reference_plan.py`), or why there are none.

An operator with a kernel needs to say nothing: where the plan's table has the kernel, the call of it is the line. One
that only moves values (`lower` gives `SameCall`) says which lines do the same (`Operator.plan`). A float call between
integers is planned where its family's file says how (`plans_reals`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from quant.graph import Kind, Node
from quant.kernels.reference_plan import Register
from quant.ops.call import called
from quant.runtime.module_call import ModuleCall
from quant.runtime.names import attribute
from quant.runtime.trees import Ref, leaves


class Unplanned(Exception):
    """A call that runs by itself; the message says why."""


Lines: TypeAlias = "list[tuple[str, dict[str, Any]]]"
"""Operations of a plan with their settings, in order: each may read the one before as BEFORE, the last is the call's
value."""

BEFORE = Register(-1)
"""What the line before gives."""


@dataclass(frozen=True)
class Symbol:
    """What a value that is no tensor is, in terms of a tensor; it takes no line.

    Attributes:
        source: the tensor's register.
    """

    source: int


@dataclass(frozen=True)
class ShapeOf(Symbol):
    """The whole shape."""


@dataclass(frozen=True)
class SizeOf(Symbol):
    """One number of a shape."""

    dim: int


@dataclass(frozen=True)
class RankOf(Symbol):
    """The number of dimensions, or what follows from it."""


@dataclass(frozen=True)
class RankCheck(Symbol):
    """A guard on the number of dimensions."""


@dataclass(frozen=True)
class PartsOf(Symbol):
    """A tuple of parts of a tensor.

    Attributes:
        dim: along which it is cut.
        count: how many parts there are, or, of `chunk`, are asked for.
    """

    dim: int
    count: int

    def part(self, index: int) -> Lines:
        """One part."""
        raise NotImplementedError

    def check(self) -> Lines:
        """Lines that no plan is made of where there are not so many parts."""
        raise NotImplementedError


@dataclass(frozen=True)
class CountOf(Symbol):
    """The length of such a tuple."""

    parts: PartsOf


Planned: TypeAlias = "Lines | Symbol | ModuleCall"


class Values(Protocol):
    """What is known of the values of a run that becomes one native call (`static/native_forms.py`)."""

    def tensor(self, value: Ref) -> Register:
        """A tensor, float32 or uint8; raises Unplanned for anything else."""

    def symbol(self, value: Ref) -> Symbol | None:
        """What a register holds that is no tensor; None where that is not known."""

    def size(self, index: int) -> Symbol | None:
        """Likewise of a value of the graph, in float."""

    def shape(self, register: Register) -> tuple[int, ...]:
        """Of a tensor, as captured."""

    def dtype(self, register: Register) -> torch.dtype | None:
        """Of a value, as captured; None where it is no tensor."""


@dataclass
class PlanCall:
    """A captured call as plans read it: what it is called with, in registers.

    Attributes:
        out: the register that it fills.
        args, kwargs: nested, with Ref to registers, or constants.
        rescaled: of a concatenation, as `SameCall` has it.
    """

    values: Values
    node: Node
    root: nn.Module
    out: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rescaled: dict[int, tuple[int, float, int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it calls, for people."""
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
        return self.values.tensor(value)

    def symbol(self) -> Symbol | None:
        """What the first argument holds, where that is no tensor."""
        value = self.argument(0, "input")
        return self.values.symbol(value) if isinstance(value, Ref) else None

    def setting(self, place: int, name: str, default: Any = None) -> Any:
        """An argument that is no activation."""
        value = self.argument(place, name)
        return default if value is None else fixed(name, value)

    def size(self, value: Any) -> int | Register:
        """A number of a shape that an operator was given: an int, or a Ref to one that is read of a tensor."""
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        known = self.values.size(value.index) if isinstance(value, Ref) else None
        if not isinstance(known, SizeOf):
            raise Unplanned("its shape is computed at run time")
        return Register(known.source, known.dim)


def fixed(name: str, value: Any) -> Any:
    """`value`, a setting, which no activation is part of."""
    if any(isinstance(leaf, Ref) for leaf in leaves(value)):
        raise Unplanned(f"its {name} is computed at run time")
    return value


def integer(name: str, value: Any) -> int:
    """`value`, a setting that is one integer."""
    if not isinstance(fixed(name, value), int) or isinstance(value, bool):
        raise Unplanned(f"its {name} is {value!r}, expected an integer")
    return int(value)
