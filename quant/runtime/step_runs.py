"""Runs of instructions that each run by themselves, such as a forward's sizes, views and sums of numbers.

What a run of them costs is Python's work between them, so that the modules they come from are looked at once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quant.runtime.filling import Fill
from quant.runtime.instructions import Instruction
from quant.runtime.origin import Edge
from quant.runtime.region import Region
from quant.runtime.single_steps import SingleStep

Joined: TypeAlias = "tuple[Sequence[Instruction | Region | StepRun], list[list[int]]]"
"""Steps, and for each the registers that no later step reads."""


@dataclass
class StepRun:
    """Neighbouring instructions that are called directly.

    Attributes:
        instructions: in order. drops: for each, the registers that nobody reads after it.
        edges: the modules that they were converted from, each once.
        calls: for each, the register of its value, what gives the value, and its drops.
    """

    instructions: list[Instruction]
    drops: list[list[int]]
    edges: list[Edge]
    calls: list[tuple[int, Fill, list[int]]]

    def run(self, registers: dict[int, Any]) -> bool:
        """Fill the registers; False, and nothing done, where a module is not in its place any more."""
        for edge in self.edges:
            if edge.children.get(edge.name) is not edge.module:
                return False
        for out, call, gone in self.calls:
            registers[out] = call(registers)
            for register in gone:
                registers.pop(register, None)
        return True


def joined(
    steps: Iterable[Instruction | Region], drops: Iterable[list[int]], single: Callable[[Instruction], SingleStep]
) -> Joined:
    """A schedule's steps and drops with each run of instructions that are called directly as one step.

    Args:
        single: prepares an instruction that runs by itself.
    """
    result: list[Instruction | Region | StepRun] = []
    kept: list[list[int]] = []
    run: list[tuple[SingleStep, list[int]]] = []

    def close() -> None:
        if run:
            result.append(_run_of(run))
            kept.append([])
            run.clear()

    for step, gone in zip(steps, drops, strict=True):
        prepared = None if isinstance(step, Region) else single(step)
        if prepared is not None and prepared.direct is not None:
            run.append((prepared, gone))
            continue
        close()
        result.append(step)
        kept.append(gone)
    close()
    return result, kept


def _run_of(parts: Sequence[tuple[SingleStep, list[int]]]) -> StepRun:
    edges = {(id(edge.children), edge.name): edge for one, _ in parts for edge in one.edges}
    calls = [(one.instruction.out, one.direct, gone) for one, gone in parts if one.direct is not None]
    return StepRun([one.instruction for one, _ in parts], [gone for _, gone in parts], list(edges.values()), calls)
