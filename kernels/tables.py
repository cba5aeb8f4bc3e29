"""Embedding tables of 8, 4, 3 and 2 bits per value: the row format, and the reference look-ups.

A row carries its own scale and bias, real = scale * q + bias, in FBGEMM's fused layout, so that one gather brings
everything a row needs and FBGEMM's table kernels read it as it is:

    8 bits: dim bytes q, then scale and bias as float32.
    4 bits: ceil(dim / 2) bytes, the even column in the low half of each, then scale and bias as float16.
    2 bits: ceil(dim / 4) bytes, column c in the bits 2 (c mod 4) and the next of byte c // 4; then as at 4 bits.
    3 bits: the two low bits of all columns as at 2 bits, ceil(dim / 8) bytes with the high bit of column c in the bit
            c mod 8 of byte c // 8; then as at 4 bits.

Below 8 bits a row may have several groups of neighbouring columns, each with its scale and bias: these follow one
after the other. The length of a row says how many there are.
"""

from __future__ import annotations

import torch
from quant.kernels.row_slices import row_slices
from torch import Tensor

TABLE_BITS = (8, 4, 3, 2)


def row_bytes(dim: int, bits: int, groups: int = 1) -> int:
    """Bytes of one packed row of `dim` values."""
    return _value_bytes(dim, bits) + groups * _end_bytes(bits)


def groups_of_rows(row: int, dim: int, bits: int) -> int:
    """The groups of a row of so many bytes; 0 where no row is so long."""
    groups, rest = divmod(row - _value_bytes(dim, bits), _end_bytes(bits))
    fits = dim >= 0 and rest == 0 and groups >= 1 and (groups == 1 or (bits < 8 and dim % groups == 0 and dim > 0))
    return groups if fits else 0


def _value_bytes(dim: int, bits: int) -> int:
    """Of the integers of a row."""
    _check_bits(bits)
    return sum((dim * plane + 7) // 8 for plane in ((2, 1) if bits == 3 else (bits,)))


def _end_bytes(bits: int) -> int:
    """Of a scale and a bias."""
    return 8 if bits == 8 else 4


def pack_table(weight: Tensor, bits: int, group_size: int | None = None) -> Tensor:
    """Pack a table, each row, or each group of a row, by its own minimum and maximum.

    Args:
        weight: of any float type, (rows, dim), finite.
        bits: 8, 4, 3 or 2.
        group_size: columns that share a scale and a bias, a divisor of dim; below 8 bits. None for the whole row.

    Returns:
        uint8 (rows, row_bytes(dim, bits, dim / group_size)).
    """
    _check_bits(bits)
    if weight.dim() != 2:
        raise ValueError(f"an embedding table has shape (rows, dim), got {tuple(weight.shape)}")
    count, dim = weight.shape
    if group_size is not None and (bits == 8 or group_size < 1 or dim % group_size):
        raise ValueError(
            f"group_size is {group_size}, expected a divisor of {dim} columns of fewer than 8 bits, or None"
        )
    groups = 1 if group_size is None else dim // group_size
    table = torch.empty(count, row_bytes(dim, bits, groups), dtype=torch.uint8, device=weight.device)
    for first, rows in row_slices(weight):
        table[first : first + len(rows)] = _pack_rows(rows, bits, groups)
    return table


def _pack_rows(weight: Tensor, bits: int, groups: int) -> Tensor:
    """`pack_table` of some float32 rows."""
    real = torch.float32 if bits == 8 else torch.float16
    weight = weight.unflatten(1, (groups, -1))
    low, high = weight.amin(dim=2, keepdim=True), weight.amax(dim=2, keepdim=True)
    # The stored numbers are what is decoded with, so q is chosen for them, not for the ones before rounding.
    bias = low.to(real)
    scale = ((high - bias.to(torch.float32)) / (2**bits - 1)).to(real)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    if not bool((torch.isfinite(bias) & torch.isfinite(scale)).all()):
        raise ValueError(f"a row's range does not fit {real}, which holds the scale and bias of {bits}-bit rows")
    q = torch.round((weight - bias.to(torch.float32)) / scale.to(torch.float32)).clamp(0, 2**bits - 1).to(torch.uint8)
    q = q.flatten(1)
    planes = [_plane(q & 3, 2), _plane(q >> 2, 1)] if bits == 3 else [_plane(q, bits)]
    tail = torch.cat([scale, bias], dim=2).flatten(1).contiguous().view(torch.uint8)
    return torch.cat([*planes, tail], dim=1)


def _plane(q: Tensor, bits: int) -> Tensor:
    """Integers of so many bits (rows, dim), side by side in bytes, the first in the lowest bits."""
    each = 8 // bits
    places = torch.nn.functional.pad(q, (0, -q.shape[1] % each)).unflatten(1, (-1, each))
    joined: Tensor = (places << torch.arange(each, dtype=torch.uint8, device=q.device) * bits).sum(
        dim=2, dtype=torch.uint8
    )
    return joined


def _from_plane(plane: Tensor, bits: int, dim: int) -> Tensor:
    """The inverse: (..., bytes) -> (..., dim)."""
    parts = [plane >> bits * place & 2**bits - 1 for place in range(8 // bits)]
    return torch.stack(parts, dim=-1).flatten(-2)[..., :dim]


def unpack_rows(rows: Tensor, bits: int, dim: int) -> Tensor:
    """uint8 (..., row_bytes) -> float32 (..., dim)."""
    split = _value_bytes(dim, bits)
    groups = groups_of_rows(rows.shape[-1], dim, bits)
    if not groups or rows.dtype != torch.uint8:
        raise ValueError(
            f"packed rows are {rows.dtype} of {rows.shape[-1]} bytes, expected uint8 of {row_bytes(dim, bits)} for "
            f"{dim} values of {bits} bits" + ("" if bits == 8 else f", and {_end_bytes(bits)} for each further group")
        )
    # A clone, not contiguous(): that leaves a single row where it is, at an offset that no float can start at.
    tail = (
        rows[..., split:]
        .clone(memory_format=torch.contiguous_format)
        .view(torch.float32 if bits == 8 else torch.float16)
        .to(torch.float32)
    )
    tail = tail.unflatten(-1, (groups, 2))
    q = rows[..., :split]
    if bits == 3:
        low = _value_bytes(dim, 2)
        q = _from_plane(q[..., :low], 2, dim) | _from_plane(q[..., low:], 1, dim) << 2
    elif bits < 8:
        q = _from_plane(q, bits, dim)
    grouped: Tensor = q.to(torch.float32).unflatten(-1, (groups, dim // groups))
    values: Tensor = grouped * tail[..., :1] + tail[..., 1:]
    return values.flatten(-2)


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
        rows: uint8 (rows, row_bytes(dim, bits, groups)).
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
        raise ValueError(f"table bits are {bits}, expected 8, 4, 3 or 2")
