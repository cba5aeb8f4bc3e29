"""The table of integer operators that a converted model calls by name, per backend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quant.kernels import dispatch
from quant.kernels.backends.compiled import CompiledBackend
from quant.kernels.reference_ops import OPS, OpTable

COMPILED = ("linear_u8s8_u8", "linear_u8s8_f32", "conv_u8s8_u8", "conv_u8s8_f32")
"""Operators that the extension computes; the rest are the reference's on every backend."""


def table(backend: str | None = None) -> OpTable:
    """Operator name -> function of plain tensors and numbers, with the arguments of `reference_ops`.

    Args:
        backend: a name of `quant.kernels.available()`, or None for the dispatcher's choice.
    """
    chosen = dispatch.current(backend or "")
    if not isinstance(chosen, CompiledBackend):
        return OPS
    known = _tables.get(chosen.name)
    if known is None or len(known) != len(OPS):  # an operator may have been added
        known = _tables[chosen.name] = _compiled(chosen.name)
    return known


def plans(backend: str | None = None) -> str | None:
    """The backend of planned runs, for a layer's or model's choice; None where the steps run one by one."""
    return compiled(backend)


def compiled(backend: str | None = None) -> str | None:
    """The extension's backend, for a layer's or model's choice; None where another computes."""
    chosen = dispatch.current(backend or "")
    return chosen.name if isinstance(chosen, CompiledBackend) else None


_tables: dict[str, OpTable] = {}
"""What `_compiled` made: not functools.cache, which torch.compile refuses to look through without a warning."""


def _compiled(backend: str) -> OpTable:
    operators = torch.ops.octet
    made: dict[str, Callable[..., Tensor]] = dict(OPS)
    made.update(quantize=operators.quantize, dequantize=operators.dequantize)
    made.update({name: _bound(getattr(operators, name), backend) for name in COMPILED})
    return made


def _bound(operator: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    return lambda *arguments: operator(*arguments, backend)
