"""Float modules of the user's in a native call; `module_calls.py` has a class of these for each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from quant.kernels.reference_plan import Constant, Line


@dataclass(frozen=True)
class ModuleCall:
    """A line that depends on a float module of the user's, whose parameters and mode are read when it runs.

    A native call keeps a copy of the parameters for as long as their versions stay, so a write that torch does not
    count, as through `weight.data`, is not seen.

    What a subclass has besides are lines of a plan, as text.

    Attributes:
        kind: its name in the text of a schedule (`schedule_text.py`); `kinds` has all classes by theirs.
        out, reads: registers.
        path: of the module.
    """

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[ModuleCall]]] = {}
    out: int
    reads: tuple[int, ...]
    path: str

    def __init_subclass__(cls) -> None:
        ModuleCall.kinds[cls.kind] = cls

    def holds(self, module: nn.Module) -> bool:
        """Whether the module may be computed natively: not hooked, and what it was when the model was converted."""
        raise NotImplementedError

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line | str:
        """The line, or its text; `constant` names a tensor in it."""
        raise NotImplementedError

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        """What the line was made from: dictionaries of the module's, and names in them."""
        return []
