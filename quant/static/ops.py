"""The table of integer operators that a converted model calls by name, per backend."""

from __future__ import annotations

from quant.kernels.reference_ops import OPS, OpTable


def table(backend: str | None = None) -> OpTable:
    """Operator name -> function of plain tensors and numbers, with the arguments of `reference_ops`.

    Args:
        backend: a name of `quant.kernels.available()`, or None for the fastest that is exact here.
    """
    return OPS
