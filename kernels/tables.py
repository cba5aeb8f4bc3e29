"""Embedding tables of 8 and 4 bits per value: the row format, and the reference look-ups.

A row carries its own scale and bias, real = scale * q + bias, in FBGEMM's fused layout, so that one gather brings
everything a row needs and FBGEMM's table kernels read it as it is:

    8 bits: dim bytes q, then scale and bias as float32.
    4 bits: ceil(dim / 2) bytes, the even column in the low half of each, then scale and bias as float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

TABLE_BITS = (8, 4)


def row_bytes(dim: int, bits: int) -> int:
    """Bytes of one packed row of `dim` values."""
    _check_bits(bits)
    return dim + 8 if bits == 8 else (dim + 1) // 2 + 4


def pack_table(weight: Tensor, bits: int) -> Tensor:
    """float32 (rows, dim), finite -> uint8 (rows, row_bytes(dim, bits)), each row by its own minimum and maximum."""
    _check_bits(bits)
    weight = weight.detach().to(torch.float32)
    if weight.dim() != 2:
        raise ValueError(f"an embedding table has shape (rows, dim), got {tuple(weight.shape)}")
    real = torch.float32 if bits == 8 else torch.float16
    low, high = weight.amin(dim=1, keepdim=True), weight.amax(dim=1, keepdim=True)
    # The stored numbers are what is decoded with, so q is chosen for them, not for the ones before rounding.
    bias = low.to(real)
    scale = ((high - bias.to(torch.float32)) / (2**bits - 1)).to(real)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    if not bool((torch.isfinite(bias) & torch.isfinite(scale)).all()):
        raise ValueError(f"a row's range does not fit {real}, which holds the scale and bias of {bits}-bit rows")
    q = torch.round((weight - bias.to(torch.float32)) / scale.to(torch.float32)).clamp(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:
        if q.shape[1] % 2:
            q = torch.cat([q, q.new_zeros(q.shape[0], 1)], dim=1)
        q = q[:, 0::2] | (q[:, 1::2] << 4)
    tail = torch.cat([scale, bias], dim=1).contiguous().view(torch.uint8)
    return torch.cat([q, tail], dim=1).contiguous()


def unpack_rows(rows: Tensor, bits: int, dim: int) -> Tensor:
    """uint8 (..., row_bytes) -> float32 (..., dim)."""
    _check_bits(bits)
    if rows.shape[-1] != row_bytes(dim, bits) or rows.dtype != torch.uint8:
        raise ValueError(
            f"packed rows are {rows.dtype} of {rows.shape[-1]} bytes, expected uint8 of {row_bytes(dim, bits)} for "
            f"{dim} values of {bits} bits"
        )
    split = rows.shape[-1] - (8 if bits == 8 else 4)
    # A clone, not contiguous(): that leaves a single row where it is, at an offset that no float can start at.
    tail = (
        rows[..., split:]
        .clone(memory_format=torch.contiguous_format)
        .view(torch.float32 if bits == 8 else torch.float16)
        .to(torch.float32)
    )
    q = rows[..., :split]
    if bits == 4:
        q = torch.stack([q & 15, q >> 4], dim=-1).flatten(-2)[..., :dim]
    return q.to(torch.float32) * tail[..., :1] + tail[..., 1:]


def embedding(rows: Tensor, indices: Tensor, bits: int, dim: int) -> Tensor:
    """The rows at `indices` (int32 or int64, any shape) as float32 (*indices.shape, dim).

    Raises:
        IndexError: an index outside the table.
    """
    _check_indices(indices, rows.shape[0])
    return unpack_rows(rows[indices.reshape(-1).to(torch.int64)], bits, dim).reshape(*indices.shape, dim)


def embedding_bag(
    rows: Tensor,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    bits: int,
    dim: int,
    mode: str,
    include_last_offset: bool,
    padding_idx: int,
) -> Tensor:
    """The sum, mean or maximum of each bag's rows, as torch.nn.functional.embedding_bag.

    Args:
        rows: uint8 (rows, row_bytes(dim, bits)).
        indices: int32 or int64 (n,).
        offsets: of indices' dtype, (bags,), or (bags + 1,) with include_last_offset; starts at 0 and never falls.
        weights: float32 (n,), a factor per index (mode "sum" only), or None.
        bits, dim: of the table.
        mode: "sum", "mean" or "max". An empty bag is zeros.
        include_last_offset: offsets ends with n.
        padding_idx: a row that counts for nothing, or -1.

    Returns:
        float32 (bags, dim).

    Raises:
        IndexError: an index outside the table, or an offset outside the indices.
    """
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"mode is {mode!r}, expected sum, mean or max")
    if weights is not None and mode != "sum":
        raise ValueError(f"per_sample_weights go with mode 'sum', not {mode!r}")
    if indices.dim() != 1 or offsets.dim() != 1:
        raise ValueError(
            f"indices and offsets must have one dimension, got {tuple(indices.shape)} and {tuple(offsets.shape)}"
        )
    if weights is not None and weights.dtype != torch.float32:
        raise TypeError(f"per_sample_weights are {weights.dtype}, expected torch.float32")
    _check_indices(indices, rows.shape[0])
    ends = offsets if include_last_offset else torch.cat([offsets, offsets.new_tensor([indices.shape[0]])])
    check_offsets(ends, indices.shape[0])
    values = embedding(rows, indices, bits, dim)
    if weights is not None:
        values = values * weights.unsqueeze(1)
    kept = torch.ones_like(indices, dtype=torch.bool) if padding_idx < 0 else indices != padding_idx
    bags = []
    for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        bag = values[first:last][kept[first:last]]
        if bag.shape[0] == 0:
            bags.append(values.new_zeros(dim))
        elif mode == "max":
            bags.append(bag.amax(dim=0))
        else:
            total = bag.sum(dim=0)
            bags.append(total if mode == "sum" else total / bag.shape[0])
    return torch.stack(bags) if bags else values.new_zeros(0, dim)


def check_offsets(ends: Tensor, count: int) -> None:
    """Raise IndexError unless `ends` starts at 0, never falls and stays within `count`."""
    if ends.shape[0] == 0 or int(ends[0]) != 0:
        raise IndexError(f"offsets must start at 0, got {ends[:1].tolist()}")
    if bool((ends[1:] < ends[:-1]).any()) or int(ends.max()) > count:
        raise IndexError(f"offsets must not fall and not exceed the {count} indices, got {ends.tolist()[:16]}")


def _check_indices(indices: Tensor, count: int) -> None:
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices are {indices.dtype}, expected int32 or int64")
    if indices.numel():
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= count:
            raise IndexError(f"index {low if low < 0 else high} is outside the table of {count} rows")


def _check_bits(bits: int) -> None:
    if bits not in TABLE_BITS:
        raise ValueError(f"table bits are {bits}, expected 8 or 4")
