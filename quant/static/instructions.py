"""The calls that a converted program consists of, one class each.

Registers: value v of the graph in float is register 2 * v, in uint8 register 2 * v + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from quant.graph import Ref, leaves

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments: nested, with Ref to registers, or constants."""


def registers_in(tree: Any) -> set[int]:
    """The registers that nested arguments name."""
    return {leaf.index for leaf in leaves(tree) if isinstance(leaf, Ref)}


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One call of a converted program.

    Attributes:
        out: the register it fills.
        step: name of the step it belongs to, for errors and comparisons.
    """

    out: int
    step: str = ""

    @property
    def kind(self) -> str:
        """What it does in a word or two, for people."""
        raise NotImplementedError

    @property
    def arguments(self) -> Arguments:
        """What it is called with."""
        raise NotImplementedError

    @property
    def reads(self) -> set[int]:
        """The registers it reads."""
        return registers_in(self.arguments)

    @property
    def value(self) -> int:
        """The value of the graph that it gives, in one form or the other."""
        return self.out // 2

    @property
    def gives_integers(self) -> bool:
        """Whether what it gives is uint8."""
        return self.out % 2 == 1


@dataclass(frozen=True, kw_only=True)
class Conversion(Instruction):
    """A value from one form into the other, by its scale and zero point."""

    source: int
    scale: float
    zero_point: int
    kernel: ClassVar[str]

    @property
    def kind(self) -> str:
        return self.kernel

    @property
    def arguments(self) -> Arguments:
        return (Ref(self.source), self.scale, self.zero_point), {}


@dataclass(frozen=True, kw_only=True)
class Quantize(Conversion):
    """float32 to uint8."""

    kernel: ClassVar[str] = "quantize"


@dataclass(frozen=True, kw_only=True)
class Dequantize(Conversion):
    """uint8 to float32."""

    kernel: ClassVar[str] = "dequantize"


@dataclass(frozen=True, kw_only=True)
class KernelCall(Instruction):
    """A kernel without weights, by its name in the table of operators (`Backend.operators`)."""

    kernel: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.kernel

    @property
    def arguments(self) -> Arguments:
        return self.args, self.kwargs


@dataclass(frozen=True, kw_only=True)
class LayerCall(Instruction):
    """An int8 layer, by its key among the runner's layers, at one of the places that call it."""

    source: int
    layer: str
    site: int

    @property
    def kind(self) -> str:
        return "layer"

    @property
    def arguments(self) -> Arguments:
        return (Ref(self.source), self.site), {}


@dataclass(frozen=True, kw_only=True)
class RecurrentCall(Instruction):
    """An int8 layer with states, by its path in the module; `integers` says whether its sequence is uint8."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    integers: bool

    @property
    def kind(self) -> str:
        return "recurrent"

    @property
    def arguments(self) -> Arguments:
        return self.args, self.kwargs


@dataclass(frozen=True, kw_only=True)
class TakeSequence(Instruction):
    """The output sequence, of all that a recurrent layer gave."""

    source: int

    @property
    def kind(self) -> str:
        return "first"

    @property
    def arguments(self) -> Arguments:
        return (Ref(self.source),), {}


@dataclass(frozen=True, kw_only=True)
class FloatCall(Instruction):
    """A captured call in the user's own arithmetic, by its node."""

    node: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def kind(self) -> str:
        return "call"

    @property
    def arguments(self) -> Arguments:
        return self.args, self.kwargs


@dataclass(frozen=True, kw_only=True)
class IntegerMove(Instruction):
    """A captured call that only moves values, by its node, on integers.

    Attributes:
        rescaled: of a concatenation, by register, how values of another range become ones of the result's: the numbers
            that `reference_ops.rescale` takes.
    """

    node: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rescaled: dict[int, tuple[int, float, int]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "cat" if self.rescaled else "move"

    @property
    def arguments(self) -> Arguments:
        return self.args, self.kwargs
