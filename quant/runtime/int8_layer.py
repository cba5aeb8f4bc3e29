"""The protocol of the int8 layers that a program calls (`layers/weighted.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Int8Layer(Protocol):
    """A module with an int8 weight, and with ranges of its own for each site that calls it.

    Attributes:
        product: the kind of product, with its kernels.
        clamps: for each site, the bounds to which its float output is clamped, or None.
    """

    q_weight: Tensor
    product: Any
    clamps: Sequence[Any]

    def site(self, site: int) -> Any:
        """The scales, zero points and multipliers of a site, with the `versions` of the tensors that they are of."""

    def places(self, site: int) -> list[tuple[dict[Any, Any], Any, Any]]:
        """What has to be where it is for the numbers of a site to hold: dictionaries, with a key and its value."""

    def compute(self, x: Tensor, site: int) -> Tensor:
        """The layer's output at a site for a uint8 input, or a float32 one of a layer with 16-bit activations."""
