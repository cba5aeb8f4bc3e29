"""Several operations of a plan in a row, and the lines that they become, with registers of their own between them."""

from __future__ import annotations

from typing import Any, TypeAlias

from quant.kernels.reference_plan import Line, Register

Lines: TypeAlias = "list[tuple[str, dict[str, Any]]]"
"""Operations of a plan with their settings, in order. Each may read those before it (`before`); the last gives the
call's value. A setting may be an Attr: a parameter or buffer of the model."""


def before(count: int) -> Register:
    """The value of the line that stands so many lines before."""
    return Register(-count)


BEFORE = before(1)
"""The value of the line before."""


def chained(operations: Lines, out: int, spare: int) -> list[Line]:
    """Operations as lines.

    Args:
        out: the register of the last one's value.
        spare: the first of the registers that nothing else uses, one for each line but the last.
    """
    last = len(operations) - 1
    return [
        Line(
            out if place == last else spare + place,
            op,
            {name: _placed(value, spare + place) for name, value in settings.items()},
        )
        for place, (op, settings) in enumerate(operations)
    ]


def _placed(value: Any, own: int) -> Any:
    """A setting with the lines before the one of register `own` by their registers."""
    if isinstance(value, tuple):
        return tuple(_placed(one, own) for one in value)
    return Register(own + value.index) if isinstance(value, Register) and value.index < 0 else value
