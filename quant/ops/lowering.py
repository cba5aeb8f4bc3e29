"""Lowering: from a step to an integer kernel's call and its arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from quant.graph import Graph
from quant.kernels import QParams
from quant.ops.operator import Interval
from quant.ops.step import Step
from quant.runtime.layers.requantizing import clamp_limits
from quant.runtime.trees import Ref, map_leaves


@dataclass(frozen=True)
class Kernel:
    """A kernel with its arguments.

    Attributes:
        name: of the operator, in `Backend.operators`.
        args, kwargs: Ref to values of the program (`Context.integers`), or constants.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SameCall:
    """The captured call itself, on integers: it computes nothing.

    Attributes:
        rescaled: for arguments of another range than the result's, by id in the program: (zero point, multiplier,
            the result's zero point), the arguments of `reference_ops.rescale`.
    """

    rescaled: dict[int, tuple[int, float, int]] = field(default_factory=dict)


class Forms(Protocol):
    """The values of a program that is being assembled."""

    def integer(self, value: int) -> int:
        """The program's uint8 value for a value of the graph."""

    def real(self, value: int) -> int:
        """The program's float value for a value of the graph, as the user's own calls give it."""


@dataclass
class Context:
    """The context in which steps are lowered.

    Attributes:
        graph, root: the captured graph and module.
        ranges: of the values that are uint8 for some reader.
        emitted: the values among them that their step gives in uint8.
        tables: known look-up tables, by step; others are computed from the step's function.
        forms: the program under assembly; set by the assembler.
    """

    graph: Graph
    root: nn.Module
    ranges: Mapping[int, QParams]
    emitted: Collection[int]
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    forms: Forms | None = None

    def integers(self, value: int) -> Ref:
        """A value of the graph in uint8, as an argument of a kernel."""
        assert self.forms is not None
        return Ref(self.forms.integer(value))

    def with_sizes(self, tree: Any) -> Any:
        """Settings of which some were computed from sizes, as arguments of a kernel."""
        forms = self.forms
        assert forms is not None
        return map_leaves(lambda leaf: Ref(forms.real(leaf.index)) if isinstance(leaf, Ref) else leaf, tree)

    def scale(self, value: int) -> float:
        """The scale of a uint8 value."""
        return float(self.ranges[value].scale)

    def zero_point(self, value: int) -> int:
        """The zero point of a uint8 value."""
        return int(self.ranges[value].zero_point)

    def ratio(self, step: Step) -> float:
        """s_x / s_y in float32."""
        return float(self.ranges[step.inputs[0]].scale / self.ranges[step.output].scale)

    def limits(self, step: Step, clamp: Interval | None) -> tuple[int, int, int]:
        """Zero point, lowest and highest integer of a step's output, clamped."""
        output = step.output
        zero_point = self.zero_point(output)
        return (zero_point, *clamp_limits(clamp, self.scale(output), zero_point))


def rescaling(name: str, step: Step, context: Context, *first: Any, **options: Any) -> Kernel:
    """A kernel of one input that takes q, z_x, the settings `first`, s_x / s_y, z_y, and the rest by name."""
    value = step.inputs[0]
    head = (context.integers(value), context.zero_point(value), *first)
    return Kernel(name, (*head, context.ratio(step), context.zero_point(step.output)), context.with_sizes(options))
