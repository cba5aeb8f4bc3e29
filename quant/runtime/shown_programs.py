"""The programs of a converted model, for people and tools: `q.program`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from quant.runtime.keys import ProgramKey
from quant.runtime.names import child_of, has_attribute
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED

ATTRIBUTE = "program"
"""Of the model; one that has an attribute of this name keeps its own."""


class ProgramsByModule(dict[str, Program]):
    """Programs by the dotted name of their module; a further one of the module has its number behind an @."""

    def __str__(self) -> str:
        if not self:
            return "no program: the model is one layer, or its layers are called by its own forward"
        return "\n\n".join(f"# {name or '(root)'}\n{program}" for name, program in self.items())


def programs_of(model: nn.Module) -> ProgramsByModule:
    """The programs of all captured modules of a model from `quant.convert` or `quant.load`."""
    return ProgramsByModule(_programs(model))


def _programs(model: nn.Module) -> Iterator[tuple[str, Program]]:
    for name, module in model.named_modules():
        first = child_of(module, RESERVED)
        if isinstance(first, ProgramRunner):
            for place, runner in enumerate(first.programs(), 1):
                yield str(ProgramKey(name, place)), runner.program


def show_programs(model: nn.Module) -> None:
    """Let a converted model have its program as an attribute; several of them by their modules."""
    programs = programs_of(model)
    if not has_attribute(model, ATTRIBUTE):
        model.__dict__[ATTRIBUTE] = programs[""] if set(programs) == {""} else programs
