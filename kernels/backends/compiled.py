"""The libraries inside the C++ extension: our own kernels, FBGEMM and QNNPACK. One class, because they differ only in
the product that csrc/torch/libraries.cpp gives; the operators around it are the same code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from quant.kernels import ops
from quant.kernels.backend import Backend
from torch import Tensor

_OPERATORS = torch.ops.octet


class CompiledBackend(Backend):
    """The operators of torch.ops.octet, bound to one library of the extension."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Instance attributes over the inherited methods: an operator goes straight to the extension.
        for operator in ops.WITH_BACKEND:
            setattr(self, operator, _bound(operator, name))

    def why_not(self) -> str:
        problem = ops.extension_problem() or ops.isa_problem()
        return problem or str(torch.ops.octet_native.why_not(self.name))

    def product(self, q_x: Tensor, q_weight: Tensor) -> Tensor:
        sums: Tensor = _OPERATORS.linear_u8s8_s32(q_x, 0, q_weight, None, self.name)
        return sums

    def route(self, q_weight: Tensor) -> str:
        return str(torch.ops.octet_native.route(q_weight, self.name))


def direct(operator: str) -> Callable[..., Any]:
    """The operator's entry in C++, without the 0.3 microseconds of Python that OpOverload.__call__ puts before it.

    Not for graphs that torch.compile makes, which know only the OpOverload.
    """
    overload = getattr(_OPERATORS, operator).default
    return getattr(overload, "_op", overload)  # type: ignore[no-any-return]


def _bound(operator: str, backend: str) -> Callable[..., Any]:
    function = getattr(_OPERATORS, operator).default
    return lambda *arguments: function(*arguments, backend)
