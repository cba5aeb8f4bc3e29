"""The programs of a converted model as its attribute `program`, to print and to inspect."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from quant.runtime.names import child_of, has_attribute
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED

ATTRIBUTE = "program"
"""The attribute's name; a model with an attribute of this name keeps its own."""


class ProgramsByModule(dict[str, Program]):
    """Dotted name of a module -> its program; a further program of the module has its number after an @."""

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
                yield f"{name}@{place}" if place > 1 else name, runner.program


def show_programs(model: nn.Module) -> None:
    """Set a converted model's attribute `program`: its program, or `ProgramsByModule` where it has several."""
    programs = programs_of(model)
    if not has_attribute(model, ATTRIBUTE):
        model.__dict__[ATTRIBUTE] = programs[""] if set(programs) == {""} else programs
