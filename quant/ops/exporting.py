"""The interface for exporters, which write a fused graph's steps in another format.

An exporter is one file: it creates an `Exporter` and registers a function for each operator class that it can write:

    text: Exporter[list[str]] = Exporter("text")

    @text.writes(Conv)
    def conv(operator: Conv, step: Step, lines: list[str]) -> None:
        lines.append(f"%{step.output} = conv %{step.inputs[0]} stride={operator.stride}")

    text.write(fused.steps, lines)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from quant.ops.operator import Float, Operator
from quant.ops.step import Step, operator_of

W = TypeVar("W")
F = TypeVar("F", bound=Callable[..., None])


class NotExportable(ValueError):
    """A fused graph has steps that the exporter cannot write; the message names them."""


class Exporter(Generic[W]):
    """A format that fused graphs can be written in.

    Args:
        name: of the format, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._forms: dict[type[Operator], Callable[..., None]] = {}

    def writes(self, *operators: type[Operator]) -> Callable[[F], F]:
        """A decorator for the function (operator, step, W) that writes steps of some classes.

        Subclasses are not included: a transposed convolution is a subclass of a convolution, but is not written as
        one.

        Raises:
            ValueError: another function writes one of them already.
        """

        def register(function: F) -> F:
            for operator in operators:
                known = self._forms.setdefault(operator, function)
                if known is not function:
                    raise ValueError(f"{self.name}: expected one function to write {operator.__name__}, "
                                     f"{known.__module__}.{known.__name__} does")  # fmt: skip
            return function

        return register

    def write(self, steps: Sequence[Step], writer: W) -> None:
        """Write a fused graph's steps in order; nothing is written where one of them cannot be.

        Args:
            steps: of a `FusedGraph`, or some of them.
            writer: what the functions write to.

        Raises:
            NotExportable: names the steps that cannot be written.
        """
        operators = [(operator_of(step), step) for step in steps]
        missing = [_described(*one) for one in operators if type(one[0]) not in self._forms]
        if missing:
            known = ", ".join(sorted(one.__name__ for one in self._forms))
            raise NotExportable(
                f"{self.name} has no form for {'; '.join(missing)}; expected operators among {known}. Register one "
                f"with @{self.name}.writes(...), or export a part of the model without them"
            )
        for operator, step in operators:
            self._forms[type(operator)](operator, step, writer)


def _described(operator: Operator, step: Step) -> str:
    reason = f": {step.reason}" if isinstance(operator, Float) and step.reason else ""
    return f"layer '{step.name}' ({type(operator).__name__}{reason})"
