"""The calls that a converted program consists of, one class each.

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
"""Positional and named arguments: nested, with Ref to values of the program, or constants."""

I = TypeVar("I", bound="Instruction")  # noqa: E741  # one letter for a type, as everywhere
One = TypeVar("One", bound="_OfOne")
Several = TypeVar("Several", bound="_OfSeveral")


def registers_in(tree: Any) -> set[int]:
    """The ids of the values that nested arguments name."""
    return {leaf.index for leaf in leaves(tree) if isinstance(leaf, Ref)}


def said_of(instruction: Instruction) -> str:
    """An instruction as errors call it: by its step, and its id in the text of the program."""
    return f"layer '{instruction.step}' (%{instruction.out})"


def renumbered(tree: Any, ids: Mapping[int, int]) -> Any:
    """Nested arguments with other ids."""
    return map_leaves(lambda leaf: Ref(ids[leaf.index]) if isinstance(leaf, Ref) else leaf, tree)


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One call of a converted program.

    Attributes:
        out: id of the value it gives.
        step: name of the step it belongs to, for errors and comparisons.
        modules: dotted names of the modules of the user's that it was made of; where another module is put in the
            place of one, it does not stand for it.
        own: whether it is the user's own arithmetic, and no step of integers or conversion.
    """

    own: ClassVar[bool] = False
    out: int
    step: str = ""
    modules: tuple[str, ...] = ()

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
        """The ids of the values it reads."""
        return registers_in(self.arguments)

    @property
    def acts(self) -> bool:
        """Whether it checks, or may do something besides giving its value."""
        return False

    def renumbered(self: I, ids: Mapping[int, int]) -> I:
        """The same call where values have other ids."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _OfOne(Instruction):
    """A call that reads one value."""

    source: int

    def renumbered(self: One, ids: Mapping[int, int]) -> One:
        return replace(self, out=ids[self.out], source=ids[self.source])


@dataclass(frozen=True, kw_only=True)
class _OfSeveral(Instruction):
    """A call with nested arguments."""

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
    """A value from one form into the other, by its scale and zero point."""

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
    """A kernel without weights, by its name in the table of operators (`Backend.operators`)."""

    kernel: str

    @property
    def kind(self) -> str:
        return self.kernel

    @property
    def table(self) -> Tensor | None:
        """The answers, uint8, of a kernel that looks them up: the only tensor among its constants; None of others."""
        return next((one for one in self.args if isinstance(one, Tensor)), None)


@dataclass(frozen=True, kw_only=True)
class LayerCall(_OfOne):
    """An int8 layer, by its key, at one of the places that call it."""

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
    """An int8 layer with states, by its path in the module; `integers` says whether its sequence is uint8."""

    path: str
    integers: bool

    @property
    def kind(self) -> str:
        return "recurrent"


@dataclass(frozen=True, kw_only=True)
class TakeSequence(_OfOne):
    """The output sequence, of all that a recurrent layer gave."""

    @property
    def kind(self) -> str:
        return "first"

    @property
    def arguments(self) -> Arguments:
        return (Ref(self.source),), {}


@dataclass(frozen=True, kw_only=True)
class FloatCall(_OfSeveral):
    """A captured call in the user's own arithmetic.

    Attributes:
        callee: what is called.
        owner: dotted name of the innermost module whose forward made the call; its train/eval mode counts.
        frozen: whether it is told `training=False` in training mode too.
        writes: whether it changes an argument of the program or a buffer of the module, and so is needed for that.
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
    """A check that a value is what the model's branch was captured with; it gives that value.

    Attributes:
        expected: what it was.
        owner: dotted name of the module whose forward decides by it.
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
    """A captured call that only moves values, on integers.

    Attributes:
        callee: what is called; None where the first argument is given back as it is.
        rescaled: of a concatenation, by id, how values of another range become ones of the result's: the numbers that
            `reference_ops.rescale` takes.
    """

    callee: Callee | None
    rescaled: dict[int, tuple[int, float, int]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "cat" if self.rescaled else "move"

    def renumbered(self, ids: Mapping[int, int]) -> IntegerMove:
        rescaled = {ids[value]: numbers for value, numbers in self.rescaled.items()}
        return replace(super().renumbered(ids), rescaled=rescaled)
