"""The instructions of a converted program, one class for each kind.

An instruction names values of its program by their ids (`values.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, TypeVar

from torch import Tensor

from quant.runtime.callee import Callee, Submodule
from quant.runtime.keys import LayerKey
from quant.runtime.trees import Ref, leaves, map_leaves

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments: nested, with Ref to values of the program, and constants."""

I = TypeVar("I", bound="Instruction")  # noqa: E741  # one letter for a type, as everywhere
One = TypeVar("One", bound="_OfOne")
Several = TypeVar("Several", bound="_OfSeveral")


NAMED = (TypeError, ValueError, RuntimeError)
"""Errors of torch and the kernels about sizes and types; the step's name is put in front of their message."""


def registers_in(tree: Any) -> set[int]:
    """The ids of the values that nested arguments name."""
    return {leaf.index for leaf in leaves(tree) if isinstance(leaf, Ref)}


def said_of(instruction: Instruction) -> str:
    """An instruction's name in errors: its step, and its id in the text of the program."""
    return f"layer '{instruction.step}' (%{instruction.out})"


def renumbered(tree: Any, ids: Mapping[int, int]) -> Any:
    """Nested arguments with other value ids, `ids[old]` for each."""
    return map_leaves(lambda leaf: Ref(ids[leaf.index]) if isinstance(leaf, Ref) else leaf, tree)


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One call of a converted program.

    Attributes:
        out: id of its value.
        step: name of the step it belongs to, for errors and comparisons.
        modules: dotted names of the user's modules that it was converted from; where the user replaces one, it is not
            valid any more.
        own: whether it is a call of the user's forward, not an integer step or a conversion.
    """

    own: ClassVar[bool] = False
    out: int
    step: str = ""
    modules: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of instruction, as text for people."""
        raise NotImplementedError

    @property
    def arguments(self) -> Arguments:
        """Its positional and keyword arguments."""
        raise NotImplementedError

    @property
    def reads(self) -> set[int]:
        """The ids of the values it reads."""
        return registers_in(self.arguments)

    @property
    def acts(self) -> bool:
        """Whether it has an effect besides its value, such as a check or a write."""
        return False

    def renumbered(self: I, ids: Mapping[int, int]) -> I:
        """The same instruction with other value ids, `ids[old]` for each."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _OfOne(Instruction):
    """An instruction that reads one value."""

    source: int

    def renumbered(self: One, ids: Mapping[int, int]) -> One:
        return replace(self, out=ids[self.out], source=ids[self.source])


@dataclass(frozen=True, kw_only=True)
class _OfSeveral(Instruction):
    """An instruction with nested arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> Arguments:
        return self.args, self.kwargs

    def renumbered(self: Several, ids: Mapping[int, int]) -> Several:
        args, kwargs = renumbered(self.arguments, ids)
        return replace(self, out=ids[self.out], args=args, kwargs=kwargs)


@dataclass(frozen=True, kw_only=True)
class Conversion(_OfOne):
    """The conversion of a value between float32 and uint8, by its scale and zero point."""

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
class KernelCall(_OfSeveral):
    """A call of a kernel without weights, by its name in `Backend.operators`."""

    kernel: str

    @property
    def kind(self) -> str:
        return self.kernel

    @property
    def table(self) -> Tensor | None:
        """The uint8 lookup table of a kernel that has one; None for other kernels."""
        return next((one for one in self.args if isinstance(one, Tensor)), None)


@dataclass(frozen=True, kw_only=True)
class LayerCall(_OfOne):
    """A call of an int8 layer, by its key, at one of the sites that call it."""

    layer: LayerKey
    site: int

    @property
    def kind(self) -> str:
        return "layer"

    @property
    def arguments(self) -> Arguments:
        return (Ref(self.source), self.site), {}


@dataclass(frozen=True, kw_only=True)
class RecurrentCall(_OfSeveral):
    """A call of an int8 recurrent layer, by its path in the module; `integers`: whether it returns a uint8 sequence."""

    path: str
    integers: bool

    @property
    def kind(self) -> str:
        return "recurrent"


@dataclass(frozen=True, kw_only=True)
class TakeSequence(_OfOne):
    """The output sequence among the outputs of a recurrent layer."""

    @property
    def kind(self) -> str:
        return "first"

    @property
    def arguments(self) -> Arguments:
        return (Ref(self.source),), {}


@dataclass(frozen=True, kw_only=True)
class FloatCall(_OfSeveral):
    """A captured call that runs as in the user's forward, in float.

    Attributes:
        callee: the function, method or module that it calls.
        owner: dotted name of the innermost module whose forward makes the call; `training` follows this module's mode.
        frozen: whether it has `training=False` in training mode too.
        writes: whether it changes an argument of the program or a buffer of the module, so that it must run.
    """

    own: ClassVar[bool] = True
    callee: Callee
    owner: str = ""
    frozen: bool = False
    writes: bool = False

    @property
    def kind(self) -> str:
        return "call"

    @property
    def acts(self) -> bool:
        return self.writes or isinstance(self.callee, Submodule)


@dataclass(frozen=True, kw_only=True)
class Guard(_OfOne):
    """A check that a value is the one with which the model's branch was captured; its value is that value.

    Attributes:
        expected: the value at capture.
        owner: dotted name of the module whose forward branches on it.
    """

    own: ClassVar[bool] = True
    expected: Any
    owner: str = ""

    @property
    def kind(self) -> str:
        return "guard"

    @property
    def acts(self) -> bool:
        return True

    @property
    def arguments(self) -> Arguments:
        return (Ref(self.source), self.expected), {}


@dataclass(frozen=True, kw_only=True)
class IntegerMove(_OfSeveral):
    """A captured call that only moves values, applied to integers.

    Attributes:
        callee: the function, method or module that it calls; None where its value is its first argument.
        rescaled: for a concatenation, value id -> the arguments of `reference_ops.rescale` that bring the value to the
            range of the result.
    """

    callee: Callee | None
    rescaled: dict[int, tuple[int, float, int]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "cat" if self.rescaled else "move"

    def renumbered(self, ids: Mapping[int, int]) -> IntegerMove:
        rescaled = {ids[value]: numbers for value, numbers in self.rescaled.items()}
        return replace(super().renumbered(ids), rescaled=rescaled)
