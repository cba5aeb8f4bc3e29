"""What a program asks of its int8 layers (`layers/weighted.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Int8Layer(Protocol):
    """A module with an int8 weight, and numbers of its own for each place that calls it.

    Attributes:
        product: what it multiplies, and the kernels that do.
        clamps: by place, the ends that its float output is clamped to, or None.
    """

    q_weight: Tensor
    product: Any
    clamps: Sequence[Any]
    _buffers: dict[str, Any]

    def site(self, site: int) -> Any:
        """The numbers of a place."""

    def knows(self, site: int, known: Any) -> bool:
        """Whether these are the numbers of a place still."""

    def compute(self, q_x: Tensor, site: int) -> Tensor:
        """Its output at a place."""
