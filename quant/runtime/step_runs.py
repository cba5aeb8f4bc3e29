"""Runs of instructions that each run by themselves, such as a forward's sizes, views and sums of numbers.

What a run of them costs is Python's work between them: each run is one function of its own (`run_code.py`), which looks
at the modules that they come from once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from quant.runtime.instructions import NAMED, Instruction, said_of
from quant.runtime.origin import Edge
from quant.runtime.region import Region
from quant.runtime.run_code import FIRST, Filled, run_function
from quant.runtime.single_steps import SingleStep

Joined: TypeAlias = "tuple[Sequence[Instruction | Region | StepRun], list[list[int]]]"
"""Steps, and for each the registers that no later step reads."""


@dataclass
class StepRun:
    """Neighbouring instructions that are called directly.

    Attributes:
        instructions: in order. drops: for each, the registers that nobody reads after it.
        edges: the modules that they were converted from, each once.
        fill: as `run`, without names in errors.
        lines: the instruction of each of its lines.
    """

    instructions: list[Instruction]
    drops: list[list[int]]
    edges: list[Edge]
    fill: Filled
    lines: dict[int, Instruction]

    def run(self, registers: dict[int, Any]) -> bool:
        """Fill the registers; False, and nothing done, where a module is not in its place any more."""
        try:
            return self.fill(registers)
        except NAMED as error:
            failed = self._failed(error)
            if failed is None or failed.own or type(error) not in NAMED:
                raise
            raise type(error)(f"{said_of(failed)}: {error}") from error

    def _failed(self, error: BaseException) -> Instruction | None:
        """The instruction that raised an error."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not self.fill.__code__:
            trace = trace.tb_next
        return None if trace is None else self.lines.get(trace.tb_lineno - FIRST)


def joined(
    root: nn.Module,
    steps: Iterable[Instruction | Region],
    drops: Iterable[list[int]],
    single: Callable[[Instruction], SingleStep],
) -> Joined:
    """A schedule's steps and drops with each run of instructions that are called directly as one step.

    Args:
        root: the module of their program.
        single: prepares an instruction that runs by itself.
    """
    result: list[Instruction | Region | StepRun] = []
    kept: list[list[int]] = []
    run: list[tuple[SingleStep, list[int]]] = []

    def close() -> None:
        if run:
            result.append(_run_of(root, run))
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


def _run_of(root: nn.Module, parts: Sequence[tuple[SingleStep, list[int]]]) -> StepRun:
    edges = list({(id(edge.children), edge.name): edge for one, _ in parts for edge in one.edges}.values())
    steps = [(one.instruction, one.direct) for one, _ in parts if one.direct is not None]
    drops = [gone for _, gone in parts]
    return StepRun([one for one, _ in steps], drops, edges, *run_function(root, steps, drops, edges))
