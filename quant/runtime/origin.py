"""Whether the modules that a program was made of are still in their places, as the runner asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn

from quant.kernels.reference_ops import OpTable
from quant.runtime.instructions import Instruction
from quant.runtime.values import Value


class Edge(NamedTuple):
    """That `children` had `module` under `name`; `path` leads there."""

    children: dict[str, nn.Module | None]
    name: str
    module: nn.Module
    path: str

    def stands(self) -> bool:
        """Whether it still has."""
        return self.children.get(self.name) is self.module


class Origin(Protocol):
    """The modules that a program was made of."""

    def edges(self, instruction: Instruction) -> list[Edge]:
        """What an instruction was made of."""

    def standing(self, instructions: Sequence[Instruction]) -> list[Edge] | None:
        """What some instructions were made of, each module once; None where one of them has changed."""

    def replaced(self) -> list[str]:
        """The paths of all places where another module is now, but for those that are called in float anyway."""

    def changed(self, instruction: Instruction) -> list[Edge]:
        """Those of these in whose place is another module now."""

    def run(
        self,
        instruction: Instruction,
        values: Sequence[Value],
        registers: dict[int, Any],
        ranges: dict[int, tuple[float, int]],
        table: OpTable,
    ) -> Any:
        """A step whose modules have changed, with those that are there now."""
