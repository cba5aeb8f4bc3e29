"""The libraries inside the C++ extension: our own kernels, FBGEMM and QNNPACK. One class, because they differ only in
the product that csrc/torch/libraries.cpp gives; the operators around it are the same code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from quant.kernels import ops
from quant.kernels.backend import Backend
from quant.kernels.reference import Product
from torch import Tensor

_OPERATORS = torch.ops.octet


class CompiledBackend(Backend):
    """The operators of torch.ops.octet, bound to one library of the extension."""

    plans: ClassVar[bool] = True
    computes_reals: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.quantize, self.dequantize = _OPERATORS.quantize, _OPERATORS.dequantize
        # Instance attributes over the inherited methods: an operator goes straight to the extension.
        for operator in ops.WITH_BACKEND:
            setattr(self, operator, _bound(operator, name))
        self._operators = self._table()

    def why_not(self) -> str:
        problem = ops.extension_problem() or ops.isa_problem()
        return problem or str(torch.ops.octet_native.why_not(self.name))

    def product(self, q_x: Tensor, q_weight: Tensor) -> Tensor:
        sums: Tensor = _OPERATORS.linear_u8s8_s32(q_x, 0, q_weight, None, self.name)
        return sums

    @property
    def _product(self) -> Product:
        return self.product  # an operator itself, which graphs keep

    def route(self, q_weight: Tensor) -> str:
        return str(torch.ops.octet_native.route(q_weight, self.name))

    def conv_route(self, q_weight: Tensor, groups: int) -> str:
        """A depthwise convolution multiplies by a kernel of its own, exact for every weight."""
        if groups > 1 and groups == q_weight.shape[0] == q_weight.shape[1] * groups:
            return "depthwise"
        return ", ".join(sorted({self.route(_rows(part, groups)) for part in q_weight.chunk(groups)}))

    def why_not_conv(self, q_weight: Tensor, groups: int) -> str:
        return ""


def _rows(q_weight: Tensor, groups: int) -> Tensor:
    """A convolution's weight (out, in, *kernel) in the order in which csrc/torch/packed.cpp multiplies it.

    Whether neighbours overflow 16 bits depends on who they are: channels last, each row of the kernel filled up to a
    multiple of four where there is one group.
    """
    width = q_weight.shape[-1] * q_weight.shape[1]
    by_row = q_weight.movedim(1, -1).reshape(q_weight.shape[0], -1, width)
    return F.pad(by_row, (0, -width % 4 if groups == 1 else 0)).flatten(1).contiguous()


def direct(operator: str) -> Callable[..., Any]:
    """The operator's entry in C++, without the 0.3 microseconds of Python that OpOverload.__call__ puts before it.

    Not for graphs that torch.compile makes, which know only the OpOverload.
    """
    overload = getattr(_OPERATORS, operator).default
    return getattr(overload, "_op", overload)  # type: ignore[no-any-return]


def _bound(operator: str, backend: str) -> Callable[..., Any]:
    function = getattr(_OPERATORS, operator).default
    return lambda *arguments: function(*arguments, backend)
