"""A program's instructions in native calls, as convert has grouped them (`native.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quant.runtime.instructions import Instruction
from quant.runtime.region import Region


@dataclass
class Schedule:
    """A program's instructions, some of them as regions.

    Attributes:
        steps: in order.
        drops: per step the registers that nobody reads after it.
        reasons: per instruction that is computed step by step, by its step's name, why.
        singles: by the ids of their values, calls of the user's own arithmetic that a kernel computes with other last
            bits than torch does: their native calls where they run by themselves.
    """

    steps: list[Instruction | Region]
    drops: list[list[int]]
    reasons: dict[str, str]
    singles: dict[int, Region] = field(default_factory=dict)

    @property
    def regions(self) -> list[Region]:
        """The native calls."""
        return [step for step in self.steps if isinstance(step, Region)]

    def __str__(self) -> str:
        return "\n".join(map(_line, self.steps, self.drops))

    def describe(self) -> str:
        """What is computed together, and why the rest is not, for the report."""
        single = sum(isinstance(step, Instruction) for step in self.steps)
        inside = [region.steps for region in self.regions]
        calls = f"native calls: {len(inside)}, of {' + '.join(map(str, inside))} steps" if inside else "no native call"
        reasons = "; ".join(f"{step}: {reason}" for step, reason in self.reasons.items())
        return f"{calls}; step by step: {single}" + (f" ({reasons})" if reasons else "")


def _line(step: Instruction | Region, drops: list[int]) -> str:
    """A step of a schedule by the ids of values."""

    def ids(title: str, values: Iterable[int]) -> str:
        shown = " ".join(f"%{value}" for value in values)
        return f" {title} {shown}" if shown else ""

    if isinstance(step, Instruction):
        return f"single %{step.out}{ids('drops', drops)}"
    computed = ids("native", (one.out for one in step.instructions)).strip()
    tail = ids("tail", (one.out for one in step.tail))
    return f"{computed}{ids('inputs', step.inputs)}{ids('outputs', step.outputs)}{tail}{ids('drops', drops)}"
