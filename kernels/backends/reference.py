"""The reference as a backend: always there, exact, and slow."""

from __future__ import annotations

from quant.kernels import reference
from quant.kernels.backend import Backend
from torch import Tensor


class ReferenceBackend(Backend):
    """Plain torch arithmetic on any machine."""

    name = "reference"

    def product(self, q_x: Tensor, q_weight: Tensor) -> Tensor:
        return reference.exact_product(q_x, q_weight)
