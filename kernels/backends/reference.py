"""The reference as a backend: always there, exact, and slow."""

from __future__ import annotations

from typing import Any, ClassVar

from quant.kernels import reference, reference_conv
from quant.kernels.backend import Backend
from quant.kernels.reference import Product
from quant.kernels.reference_ops import OPS, OpTable
from torch import Tensor


class ReferenceBackend(Backend):
    """Plain torch arithmetic on any machine."""

    name = "reference"
    transposes: ClassVar[bool] = True

    @property
    def operators(self) -> OpTable:
        return OPS

    def product(self, q_x: Tensor, q_weight: Tensor) -> Tensor:
        return reference.exact_product(q_x, q_weight)

    @property
    def _product(self) -> Product:
        return reference.exact_product  # plain torch, in graphs too

    def conv_route(self, q_weight: Tensor, groups: int) -> str:
        return "exact"

    def why_not_conv(self, q_weight: Tensor, groups: int) -> str:
        return ""

    def conv_u8s8_s32(self, *arguments: Any) -> Tensor:
        return reference_conv.conv_u8s8_s32(*arguments)
