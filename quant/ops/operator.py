"""What a step computes: a frozen dataclass per operator, its settings as fields and its traits as class variables.

A trait is something that passes ask of every operator. A pass that asks for something else looks at the class itself
(`isinstance`), so that an operator which is added later is not taken for another one by its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from quant.folding import Affine
from quant.ops.planning import Lines, PlanCall, Planned, Unplanned

if TYPE_CHECKING:
    from quant.ops.lowering import Context, Kernel, SameCall
    from quant.ops.step import Step
    from quant.runtime.layers.products import Product

Interval = tuple[float, float]


@dataclass(frozen=True)
class Operator:
    """What a step computes.

    Attributes:
        name: lower case, for reports.
        integer: whether it computes in integers.
        anchor: whether its inputs are worth quantising for it; other operators become integers only between integers.
        shares_range: its inputs and its output have one range, because values pass through it unchanged; of a
            concatenation only those inputs that nobody else reads (`fusion/concat_ranges.py`).
        gives_reals: it has a kernel that gives float32 as well.
    """

    name: ClassVar[str] = ""
    integer: ClassVar[bool] = True
    anchor: ClassVar[bool] = False
    shares_range: ClassVar[bool] = False
    gives_reals: ClassVar[bool] = False

    @property
    def needs_rank(self) -> bool:
        """Whether its integers are those of the call for an input of the captured number of dimensions alone."""
        return False

    def lower(self, step: Step, context: Context) -> Kernel | SameCall:
        """The integer kernel's call for the step, or `SameCall` where the captured call itself works on integers.

        Args:
            step: whose operator this is.
            context: knows the ranges.
        """
        raise NotImplementedError(f"{self.name} is computed by a layer")

    def plan(self, call: PlanCall) -> Planned:
        """The plan's lines for a step that is lowered to `SameCall`; a kernel's call is a line by itself.

        Raises:
            Unplanned: it has no lines; the message says why.
        """
        raise Unplanned(f"{call.name} has no native kernel")

    def plan_real(self, call: PlanCall) -> Lines | None:
        """The same for the captured call on float values; None where it has none."""
        return None


@dataclass(frozen=True)
class Float(Operator):
    """The user's own arithmetic.

    Attributes:
        reason: why it is float, for the report.
        has_integer_form: whether there is a kernel for it, and the recipe or convert leaves it float.
        form: the integer operator that it would be, where it is float because of its neighbours.
        per_call: whether the recipe asks for ranges of each call, so that convert makes it dynamic where it can.
    """

    name: ClassVar[str] = "float"
    integer: ClassVar[bool] = False
    reason: str = ""
    has_integer_form: bool = False
    form: Operator | None = None
    per_call: bool = False


@dataclass(frozen=True)
class ShapeOnly(Operator):
    """Inputs, guards and reads of sizes: no values are computed."""

    name: ClassVar[str] = "shape"
    integer: ClassVar[bool] = False


@dataclass(frozen=True)
class Clampable(Operator):
    """An operator whose requantisation can clamp as well.

    Attributes:
        clamp: (low, high) that the output is clamped to, or None.
    """

    clamp: Interval | None = None


@dataclass(frozen=True)
class Weighted(Clampable):
    """A linear layer or a convolution.

    Attributes:
        weight, bias: an Attr, a Ref to what follows from parameters alone, a tensor, or None for no bias.
        batch_norm: the batch norm's node that is folded in, or None.
        affine: the channel scales and shifts that are folded in, in order.
    """

    anchor: ClassVar[bool] = True
    gives_reals: ClassVar[bool] = True
    weight: Any = None
    bias: Any = None
    batch_norm: int | None = None
    affine: tuple[Affine, ...] = ()

    def int8(self) -> Product:
        """The product that the int8 layer computes, with its settings."""
        raise NotImplementedError

    @property
    def is_folded(self) -> bool:
        """Whether something is folded into the weight."""
        return self.batch_norm is not None or bool(self.affine)

    @property
    def input_channel_axis(self) -> int:
        """The axis of the input that has a channel per index."""
        return 1

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer in float with another weight and bias, without its clamp and without what is folded in."""
        raise NotImplementedError

    def output_first(self, weight: Tensor) -> Tensor:
        """The layer's weight with its output channels first."""
        return weight

    def as_layer(self, rows: Tensor) -> Tensor:
        """The inverse of `output_first`."""
        return rows

    def clamped(self, y: Tensor) -> Tensor:
        """`y` clamped as the operator does."""
        return y if self.clamp is None else torch.clamp(y, *self.clamp)


@dataclass(frozen=True)
class Recurrent(Operator):
    """A layer with states, which have ranges of their own inside of it (`runtime/layers/recurrent.py`).

    Attributes:
        ranges: the names of these ranges, in order; `FusedGraph.inner` gives their slots.
    """

    anchor: ClassVar[bool] = True
    ranges: tuple[str, ...] = ()
