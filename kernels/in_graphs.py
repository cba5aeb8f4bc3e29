"""Products of backends written in Python, as opaque operators of graphs.

`torch.compile`, `torch.export` and `torch.jit.trace` keep the calls, and the machine that runs the graph must have the
backend. The extension's libraries have operators of their own (`ops.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from quant.kernels.reference import check_linear
from torch import Tensor

SCHEMAS = {
    "product": "(Tensor q_x, Tensor q_weight, str backend) -> Tensor",
    "conv_by_product": "(Tensor q_x, int zero_point, Tensor q_weight, Tensor? q_bias, int[] stride, int[] padding, "
    "int[] dilation, int groups, str backend) -> Tensor",
}


class _Multiplies(Protocol):
    def product(self, q_x: Tensor, q_weight: Tensor) -> Tensor: ...

    def conv_u8s8_s32(self, *arguments: Any) -> Tensor: ...


_library = torch.library.Library("octet", "FRAGMENT")


def define(find: Callable[[str], _Multiplies]) -> None:
    """Define the operators; `find` returns a backend by its name."""

    def product(q_x: Tensor, q_weight: Tensor, backend: str) -> Tensor:
        _check_product(q_x, q_weight)
        return find(backend).product(q_x, q_weight)

    def conv_by_product(*arguments: Any) -> Tensor:
        *operands, backend = arguments
        _check_there(operands[0], operands[2])
        return find(backend).conv_u8s8_s32(*operands)

    for name, function in (("product", product), ("conv_by_product", conv_by_product)):
        _library.define(name + SCHEMAS[name])
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # no gradient goes through integers
        _library.impl(name, function, "CPU")
    torch.library.register_fake("octet::product", _fake_product, lib=_library)
    # The sums of the extension's operator, which has the same arguments and whose shapes are known.
    torch.library.register_fake("octet::conv_by_product", torch.ops.octet.conv_u8s8_s32, lib=_library)


def _check_there(*operands: Tensor | None) -> None:
    """Raise TypeError for None, which torch takes for a tensor."""
    if any(one is None for one in operands):
        raise TypeError("an operand is None, expected a tensor")


def _check_product(q_x: Tensor, q_weight: Tensor) -> None:
    """Raise ValueError or TypeError for operands that no backend multiplies: some libraries end the process by them."""
    _check_there(q_x, q_weight)
    check_linear(q_x, q_weight, torch.uint8)
    if q_x.dim() != 2:
        raise ValueError(f"input has shape {tuple(q_x.shape)}, expected (M, K)")


def is_made() -> bool:
    """Whether this thread's calls are being traced into a graph."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _fake_product(q_x: Tensor, q_weight: Tensor, backend: str) -> Tensor:
    _check_product(q_x, q_weight)
    return q_x.new_empty((q_x.shape[0], q_weight.shape[0]), dtype=torch.int32)
