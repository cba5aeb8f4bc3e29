"""The description of a static conversion, from which it can be repeated on the float model without data: plain JSON.

The user's code determines the graph, so no code is stored: `artefact/rebuild.py` captures the model again, on example
inputs of the same shapes, and uses the stored ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from quant.kernels import QParams
from quant.recipe import QConfig
from quant.runtime.instructions import KernelCall
from quant.runtime.keys import ProgramKey
from quant.runtime.names import child_of
from quant.runtime.part import Part
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED

DESCRIPTION = RESERVED + "_description"
"""The attribute of a converted model that holds its description."""

VERSION = 1

T = TypeVar("T")


def describe(converted: nn.Module) -> dict[str, Any]:
    """The JSON-ready description of a model from `convert`: everything but its tensors.

    Raises:
        ValueError: the model is not from `convert`.
    """
    description = converted.__dict__.get(DESCRIPTION)
    if not isinstance(description, dict):
        raise ValueError(
            f"{type(converted).__name__}: expected a model from quant.convert, this one has no description"
        )
    tuned = {
        str(unit): runner.backend
        for unit, runner in captured_runners(converted)
        if runner.backend != description["backend"]
    }
    return {**description, "backends": tuned} if tuned else description


def make_description(
    example: Any,
    ranges: Mapping[ProgramKey, Mapping[str, QParams]],
    calls: Mapping[ProgramKey, list[str]],
    layers: Mapping[str, QConfig],
    backend: str | None,
    rules: int,
) -> dict[str, Any]:
    """The description of a conversion, which `convert` adds to.

    Args:
        example: from `encode`; None where the example inputs cannot be written in JSON.
        ranges: program -> slot -> scale and zero point.
        calls: program -> its signature.
        layers: full name -> settings; layers without an entry are float.
        rules: the version of the rules by which graphs were fused (`fused_graph.RULES`).
    """
    numbers = {
        str(unit): {name: [float(one.scale), int(one.zero_point)] for name, one in slots.items()}
        for unit, slots in ranges.items()
    }
    return {
        "version": VERSION,
        "rules": rules,
        "example": example,
        "ranges": numbers,
        "calls": by_text(calls),
        "layers": {name: qconfig.to_dict() for name, qconfig in layers.items()},
        "backend": backend,
    }


def by_text(programs: Mapping[ProgramKey, T]) -> dict[str, T]:
    """What a description has of programs, by the texts of their keys."""
    return {str(key): value for key, value in programs.items()}


def tables(converted: nn.Module) -> dict[str, Tensor]:
    """The look-up tables of a model from `convert`, by "unit/step"; no part of its state_dict.

    They are stored because they are computed by float functions, which two machines may round differently.
    """
    return {table_text(key, step): table for key, step, table in _lookups(converted)}


def table_text(key: ProgramKey, step: str) -> str:
    """What a file calls the look-up table of a program's step."""
    return f"{key}/{step}"


def captured_runners(converted: nn.Module) -> Iterator[tuple[ProgramKey, ProgramRunner]]:
    """The runners of all programs."""
    for unit, module in converted.named_modules():
        runner = child_of(module, RESERVED)
        if isinstance(runner, ProgramRunner):
            for place, one in enumerate(runner.programs(), 1):
                yield ProgramKey(unit, place), one


def _lookups(converted: nn.Module) -> Iterator[tuple[ProgramKey, str, Tensor]]:
    for unit, runner in captured_runners(converted):
        for program in [runner.program, *_part_programs(runner.root, runner)]:
            for one in program.instructions:
                if isinstance(one, KernelCall) and one.table is not None:
                    yield unit, one.step, one.table


def _part_programs(unit: nn.Module, runner: ProgramRunner) -> Iterator[Program]:
    for module in unit.modules():
        part = getattr(module.__dict__.get("forward"), "__self__", None)
        if isinstance(part, Part) and part.runner is runner and isinstance(part.program, Program):
            yield part.program
