"""A program's instructions grouped into native calls; `static/native.py` decides the groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quant.runtime.instructions import Instruction
from quant.runtime.region import Region


@dataclass
class Schedule:
    """A program's instructions in the order in which they run, some of them grouped into regions.

    Attributes:
        steps: regions and single instructions, in order.
        drops: for each step, the registers that no later step reads.
        reasons: name of a step that runs by itself -> the reason.
        singles: id of a float call's value -> its region of one. A kernel may round it otherwise than torch does, so it
            runs natively by itself too.
        whole: all instructions as one native call, where single ones of `steps` are views, which torch gives without a
            copy.
    """

    steps: list[Instruction | Region]
    drops: list[list[int]]
    reasons: dict[str, str]
    singles: dict[int, Region] = field(default_factory=dict)
    whole: Region | None = None

    @property
    def regions(self) -> list[Region]:
        """The native calls."""
        return [step for step in self.steps if isinstance(step, Region)]

    def __str__(self) -> str:
        return "\n".join(map(_line, self.steps, self.drops))

    def describe(self) -> str:
        """A line for the report: the native calls, and the steps outside of them with the reasons."""
        single = sum(isinstance(step, Instruction) for step in self.steps)
        inside = [region.steps for region in self.regions]
        calls = f"native calls: {len(inside)}, of {' + '.join(map(str, inside))} steps" if inside else "no native call"
        reasons = "; ".join(f"{step}: {reason}" for step, reason in self.reasons.items())
        return f"{calls}; step by step: {single}" + (f" ({reasons})" if reasons else "")


def _line(step: Instruction | Region, drops: list[int]) -> str:
    """A step as a line of text."""

    def ids(title: str, values: Iterable[int]) -> str:
        shown = " ".join(f"%{value}" for value in values)
        return f" {title} {shown}" if shown else ""

    if isinstance(step, Instruction):
        return f"single %{step.out}{ids('drops', drops)}"
    computed = ids("native", (one.out for one in step.instructions)).strip()
    tail = ids("tail", (one.out for one in step.tail))
    return f"{computed}{ids('inputs', step.inputs)}{ids('outputs', step.outputs)}{tail}{ids('drops', drops)}"
