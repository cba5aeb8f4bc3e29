"""An embedding of the places 0, 1, ... up to a size: a plan takes the first rows of its table, without indices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quant.kernels.reference_plan import Constant, Line, Register
from quant.runtime.int8_module_calls import EmbeddingCall
from quant.runtime.recurrent_lines import RECURRENT, SPAN

ROWS = "{rows}"
"""Stands in the text for the constant with the table."""


@dataclass(frozen=True)
class PlacesCall(EmbeddingCall):
    """An embedding of `torch.arange(size)`; `reads` are what the size is read from.

    Attributes:
        whole: its lines, with ROWS for the table.
    """

    kind: ClassVar[str] = "places"
    whole: str

    def holds(self, module: nn.Module) -> bool:
        # One row would be repeated where the size is larger, which torch refuses.
        return super().holds(module) and int(module.num_embeddings) > 1  # type: ignore[arg-type]

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> str:  # type: ignore[override]
        rows = module.weight if type(module) is nn.Embedding else module(torch.arange(int(module.num_embeddings)))  # type: ignore[arg-type]
        assert isinstance(rows, Tensor)
        return self.whole.replace(ROWS, str(constant(rows)))

    def lines(self) -> list[str]:
        return self.whole.replace(ROWS, str(Constant(0))).split("\n")


def places_call(out: int, reads: tuple[int, ...], path: str, size: Any, width: int) -> PlacesCall:
    """The call for a size of a plan. More places than rows are refused where the plan is built: rows do not expand."""
    first, second = Register(RECURRENT + out * SPAN), Register(RECURRENT + out * SPAN + 1)
    lines = (
        Line(first.index, "constant", {"value": ROWS}),
        Line(second.index, "slice", {"x": first, "dim": 0, "start": 0, "end": size, "step": 1}),
        Line(out, "expand", {"x": second, "shape": (size, width)}),
    )
    return PlacesCall(out, reads, path, "\n".join(map(str, lines)))
