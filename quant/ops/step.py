"""A step of a fused graph: one or more captured calls that are computed together."""

from __future__ import annotations

from dataclasses import dataclass

from quant.ops.operator import Float, Operator, Recurrent, Weighted
from quant.recipe import QConfig


@dataclass(eq=False)
class Step:
    """One or more captured calls that are computed together.

    Attributes:
        operator: what they compute.
        nodes: indices of the calls, in order; the value of the last is the step's.
        inputs: the values it reads as activations.
        name: for reports, and of its observer.
        qconfig: the settings of a step with a weight or with states.
    """

    operator: Operator
    nodes: tuple[int, ...]
    inputs: tuple[int, ...] = ()
    name: str = ""
    qconfig: QConfig | None = None

    @property
    def output(self) -> int:
        """The value that it computes."""
        return self.nodes[-1]

    @property
    def integer(self) -> bool:
        """Whether it computes in integers."""
        return self.operator.integer

    @property
    def weighted(self) -> Weighted:
        """The operator, of a step that has a weight."""
        assert isinstance(self.operator, Weighted), self.name
        return self.operator

    @property
    def reads_two_bytes(self) -> bool:
        """Whether it is a layer with 16-bit activations: it takes float32, and rounds that to two bytes itself."""
        return isinstance(self.operator, Weighted) and self.qconfig is not None and self.qconfig.activation_bits == 16

    @property
    def reason(self) -> str:
        """Why it is float; '' where it is not."""
        return self.operator.reason if isinstance(self.operator, Float) else ""


def operator_of(step: Step) -> Operator:
    """A step's operator, in integers or in float; `Float` for arithmetic that no family recognises."""
    known = step.operator
    return known.form if isinstance(known, Float) and known.form is not None else known


def is_recurrent(step: Step) -> bool:
    """Whether the step is a call of a layer with states that becomes int8."""
    return isinstance(step.operator, Recurrent)
