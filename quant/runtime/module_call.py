"""A call of a float module inside a region; `module_calls.py` has a class for each kind of module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from quant.kernels.reference_plan import Constant, Line


@dataclass(frozen=True)
class ModuleCall:
    """A line of a plan that depends on a float module, whose parameters and mode are read when the region runs.

    A region keeps a copy of the parameters until their versions change, so it does not see a write that torch does not
    count, such as one through `weight.data`.

    Further fields of a subclass are lines of a plan, as text, or numbers, booleans and names.

    Attributes:
        kind: its name in the text of a schedule (`schedule_text.py`).
        kinds: kind -> class, for all subclasses.
        out, reads: registers.
        path: the module's dotted name.
    """

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[ModuleCall]]] = {}
    out: int
    reads: tuple[int, ...]
    path: str

    def __init_subclass__(cls) -> None:
        ModuleCall.kinds[cls.kind] = cls

    @property
    def outs(self) -> tuple[int, ...]:
        """The registers that its lines write for others."""
        return (self.out,)

    def holds(self, module: nn.Module) -> bool:
        """Whether the region may compute the module: it has no hooks, and is of the class it had at conversion."""
        raise NotImplementedError

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line | str:
        """The line, or the text of one or more; `constant` names a tensor in it."""
        raise NotImplementedError

    def lines(self) -> list[str]:
        """The further fields that are lines of a plan, as a file's reader checks them."""
        return [getattr(self, item.name) for item in fields(self)[3:] if item.type == str.__name__]

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        """The sources of the line's numbers: dictionaries of the module, each with a key."""
        return []
