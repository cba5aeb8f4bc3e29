"""The oracle for the layers of a plan that quantise as they go: embeddings, dynamic linear layers, recurrent layers.

Their arithmetic is that of `reference` and `reference_rnn`; here are the settings that a plan's text has for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from quant.kernels import narrow, reference, reference_rnn, tables
from quant.kernels.recurrent.kind import find
from torch import Tensor
from torch._subclasses import FakeTensor

States = tuple[Tensor, Tensor, Tensor]
"""y of all steps, and h and c after the last one."""


class OutOfTable(IndexError):
    """An index names no row of a table."""


def linear_dynamic(
    x: Tensor,
    q_weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    columns: Tensor | None,
    bits: int,
    per_row: bool,
) -> Tensor:
    """`reference.linear_dynamic`, without ReLU."""
    if isinstance(x, FakeTensor) or x.is_meta:
        return x.new_empty((*x.shape[:-1], q_weight.shape[0]))
    return reference.linear_dynamic(x, q_weight, scale, bias, columns, bits, per_row, False)


def embedding(x: Tensor, weight: Tensor) -> Tensor:
    """The float32 rows of `weight` that int64 x names."""
    _check_indices(x, weight.shape[0])
    return torch.nn.functional.embedding(x, weight)


def embedding_table(x: Tensor, rows: Tensor, bits: int, dim: int) -> Tensor:
    """The same of a packed table (`tables`), as float32."""
    _check_indices(x, rows.shape[0])
    return tables.unpack_rows(torch.nn.functional.embedding(x, rows), bits, dim)


def _check_indices(x: Tensor, count: int) -> None:
    if isinstance(x, FakeTensor) or x.numel() == 0:
        return
    outside = x[(x < 0) | (x >= count)]
    if outside.numel():
        raise OutOfTable(f"index {int(outside[0])} is outside the table of {count} rows")


def rnn_static(q_x: Tensor, h: Tensor | None, c: Tensor | None, mode: str, **settings: Any) -> States:
    """One direction of one recurrent layer (`reference_rnn.rnn_layer_static`); no state is one of zeros."""
    first = _first_states(q_x, h, c, mode, settings)
    if isinstance(q_x, FakeTensor):
        return _shapes(q_x, first, torch.uint8 if settings["quantized"] else torch.float32)
    return reference_rnn.rnn_layer_static(q_x, h=first[0], c=first[1], mode=mode, batch_sizes=None, **settings)


def rnn_dynamic(x: Tensor, h: Tensor | None, c: Tensor | None, mode: str, bits: int, **settings: Any) -> States:
    """The same with ranges per row (`reference_rnn.rnn_layer`)."""
    first = _first_states(x, h, c, mode, settings)
    if isinstance(x, FakeTensor):
        return _shapes(x, first, torch.float32)
    return reference_rnn.rnn_layer(
        x, h=first[0], c=first[1], mode=mode, batch_sizes=None, activation_bits=bits, **settings
    )


def _first_states(
    x: Tensor, h: Tensor | None, c: Tensor | None, mode: str, settings: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    kind, weight, batch = find(mode), settings["q_weight_hh"], x.shape[1]
    width, state = weight.shape[0], narrow.columns_of(weight)
    h = x.new_zeros((batch, state), dtype=torch.float32) if h is None else h
    if kind.has_cell and c is None:
        c = x.new_zeros((batch, width // kind.gates), dtype=torch.float32)
    return h, c


def _shapes(x: Tensor, first: tuple[Tensor, Tensor | None], dtype: torch.dtype) -> States:
    h, c = first
    y = x.new_empty((x.shape[0], x.shape[1], h.shape[1]), dtype=dtype)
    return y, torch.empty_like(h), h.new_empty(0) if c is None else torch.empty_like(c)


LAYERS: dict[str, Callable[..., Tensor]] = {
    "linear_dynamic": linear_dynamic,
    "embedding": embedding,
    "embedding_table": embedding_table,
}
"""By the names that a plan's text has for them."""

RECURRENT: dict[str, Callable[..., States]] = {"rnn_static": rnn_static, "rnn_dynamic": rnn_dynamic}
"""The same, of those whose final states are values too."""
