"""Weights of 4, 3 and 2 bits as they are stored, in memory and in files: the one definition, and the way in and out.

A narrow weight (N, K) is two tensors, whose dtypes and shapes say all about it; K is a multiple of 32:

    q_weight  uint8 (N, bits, K / 8)   the integers u of [0, 2**bits)
    scale     float32 (N,)             one scale per output; or
              float16 or float32 (N, groups), one per output and group of K / groups inputs; or
              the same (N, groups, 2), each scale with its zero point beside it, a whole number of [0, 2**bits)

    real = scale * (u - zero_point)    without a zero point of its own it is 2**(bits - 1)

The bytes of q_weight lie as kernels read them, so that nothing is packed again: panels of 64 outputs (the last of what
is left), in a panel blocks of 32 inputs, in a block `bits` vectors, in a vector four bytes for each of its outputs.
Inputs count from the block's first:

    4 bits: byte j of vector v has input 8v + j in its low half and input 8v + 4 + j in its high half.
    2 bits: byte j of vector v has input 16v + 4s + j in its bits 2s and 2s + 1.
    3 bits: vectors 0 and 1 have the two low bits of all inputs, as at 2 bits; byte j of vector 2 has the high bit of
            input 4s + j in its bit s.

No `from __future__ import annotations`: torch.jit.script reads those of `dequantize` and `dequantize_rows`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from quant.kernels.row_slices import row_slices
from quant.kernels.scheme import SCALE_MIN, affine_qparams, divided, quantize_weight
from torch import Tensor

NARROW_BITS = (4, 3, 2)
"""Bits of a weight that is not stored as bytes."""

GROUP_SIZES = (32, 64, 128)
"""Inputs that may share a scale."""

PANEL, BLOCK = 64, 32
"""Outputs, and inputs, whose bytes lie together."""

HALF_MIN = 2.0**-14
"""The smallest normal float16: scales below it are stored as float32."""


Shares = Callable[[Tensor], Tensor]
"""Of groups, float32 (N, groups, size), the share in (0, 1] of each one's range that its integers span: (N, groups)."""


class Groups(NamedTuple):
    """Scales by group: float32 (N, groups), and zero points of the same shape."""

    scale: Tensor
    zero_point: Tensor


def is_narrow(q_weight: Tensor) -> bool:
    """Whether a weight's integers are stored in fewer than 8 bits."""
    return q_weight.dtype == torch.uint8


def fits(columns: int, bits: int) -> bool:
    """Whether a weight of so many inputs is stored narrow; others are stored as bytes."""
    return bits in NARROW_BITS and columns > 0 and columns % BLOCK == 0


def columns_of(q_weight: Tensor) -> int:
    """K of a weight, narrow or of bytes."""
    return q_weight.shape[2] * 8 if is_narrow(q_weight) else q_weight.shape[1]


def group_size_of(q_weight: Tensor, scale: Tensor) -> int | None:
    """Inputs that share a scale; None where all inputs of an output do."""
    return None if scale.dim() == 1 else columns_of(q_weight) // scale.shape[1]


def described(q_weight: Tensor, scale: Tensor) -> str:
    """A weight's form in errors and reports."""
    if not is_narrow(q_weight) or q_weight.dim() != 3:
        dtype = "bytes" if q_weight.dtype == torch.int8 else str(q_weight.dtype)
        return f"of {dtype}, {tuple(q_weight.shape)}"
    bits, size = q_weight.shape[1], group_size_of(q_weight, scale)
    by = "a scale per output" if size is None else f"groups of {size}"
    zeros = " with zero points" if scale.dim() == 3 else ""
    return f"of {bits} bits with {by}{zeros}, ({q_weight.shape[0]}, {columns_of(q_weight)})"


def check(q_weight: Tensor, scale: Tensor) -> None:
    """Raise TypeError or ValueError unless these are the two tensors of a narrow weight."""
    if q_weight.dtype != torch.uint8 or q_weight.dim() != 3 or q_weight.shape[1] not in NARROW_BITS:
        raise ValueError(
            f"q_weight must be uint8 of shape (N, 2 to 4 bits, K / 8), got {q_weight.dtype} of shape "
            f"{tuple(q_weight.shape)}"
        )
    outputs, columns = q_weight.shape[0], columns_of(q_weight)
    if columns == 0 or columns % BLOCK:
        raise ValueError(f"q_weight has {columns} inputs, expected a multiple of {BLOCK}")
    if scale.dtype != torch.float32 and (scale.dtype != torch.float16 or scale.dim() == 1):
        raise TypeError(f"scale is {scale.dtype}, expected torch.float32, or torch.float16 where inputs are in groups")
    if scale.dim() == 1 and scale.shape[0] == outputs:
        return
    groups = scale.shape[1] if scale.dim() in (2, 3) else 0
    if (
        groups == 0
        or scale.shape[0] != outputs
        or columns % groups
        or columns // groups not in GROUP_SIZES
        or scale.shape[2:] not in ((), (2,))
    ):
        counts = ", ".join(str(columns // size) for size in GROUP_SIZES if columns % size == 0)
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}, expected ({outputs},), or ({outputs}, groups) with {counts} groups "
            "and no or 2 values a group"
        )


def check_numbers(q_weight: Tensor, scale: Tensor) -> None:
    """Raise ValueError unless scales by group, which kernels take apart by their bits, are finite and not negative, and
    zero points integers of the weight."""
    if scale.dim() == 1 or scale.is_meta or torch.compiler.is_compiling():
        return
    by, top = groups_of(q_weight, scale), 2 ** q_weight.shape[1] - 1
    wrong = torch.signbit(by.scale) | ~torch.isfinite(by.scale)
    _refuse("scale", by.scale, wrong, "a finite number that is not negative")
    wrong = ~((by.zero_point >= 0) & (by.zero_point <= top) & (by.zero_point == by.zero_point.floor()))
    _refuse("zero point", by.zero_point, wrong, f"a whole number from 0 to {top}")


def _refuse(name: str, values: Tensor, wrong: Tensor, expected: str) -> None:
    if bool(wrong.any()):
        output, group = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name} of output {output}, group {group} is {float(values[output, group])}, expected {expected}"
        )


def pack(u: Tensor, bits: int) -> Tensor:
    """The integers u (N, K), each in [0, 2**bits), as stored: uint8 (N, bits, K / 8)."""
    rows, columns = u.shape
    if not fits(columns, bits):
        raise ValueError(f"{columns} inputs of {bits} bits, expected a multiple of {BLOCK} of {NARROW_BITS} bits")
    blocks = u.to(torch.uint8).reshape(rows, columns // BLOCK, BLOCK)
    if bits == 4:
        halves = blocks.unflatten(2, (4, 2, 4))
        vectors = halves[:, :, :, 0] | halves[:, :, :, 1] << 4
    else:
        vectors = _fields(blocks & 3, 2)
        if bits == 3:
            vectors = torch.cat([vectors, _fields(blocks >> 2, 1)], dim=2)
    return _in_panels(vectors).reshape(rows, bits, columns // 8)


def _fields(blocks: Tensor, bits: int) -> Tensor:
    """(N, blocks, 32) -> (N, blocks, bits, 4): 8 / bits neighbouring fours of inputs in the bits of one."""
    fours = blocks.unflatten(2, (bits, 8 // bits, 4))
    vectors = torch.zeros_like(fours[:, :, :, 0])
    for place in range(8 // bits):
        vectors |= fours[:, :, :, place] << bits * place
    return vectors


def _in_panels(vectors: Tensor) -> Tensor:
    """(N, blocks, bits, 4) -> the same bytes in the order of panels, flat."""
    whole = vectors.shape[0] // PANEL * PANEL
    full = vectors[:whole].unflatten(0, (-1, PANEL)) if whole else vectors[:0].unsqueeze(0)
    left = vectors[whole:].unsqueeze(0)
    return torch.cat([full.permute(0, 2, 3, 1, 4).flatten(), left.permute(0, 2, 3, 1, 4).flatten()])


def unpack(q_weight: Tensor) -> Tensor:
    """The integers u of a narrow weight: uint8 (N, K)."""
    rows, bits, _ = q_weight.shape
    blocks, flat = columns_of(q_weight) // BLOCK, q_weight.reshape(-1)
    whole = rows // PANEL * PANEL
    split = flat.numel() // max(rows, 1) * whole
    full = flat[:split].reshape(-1, blocks, bits, PANEL, 4).permute(0, 3, 1, 2, 4).reshape(-1, blocks, bits, 4)
    left = flat[split:].reshape(blocks, bits, rows - whole, 4).permute(2, 0, 1, 3)
    return _integers(torch.cat([full, left]), bits)


def unpack_rows(q_weight: Tensor, rows: Tensor, panel: int = PANEL) -> Tensor:
    """`unpack(q_weight)[rows]` without the other rows; int64 (count,) -> uint8 (count, K)."""
    # `panel` is PANEL, an argument because torch.jit.script knows no global numbers.
    outputs, bits, eighth = q_weight.shape
    vectors, whole = eighth * bits // 4, outputs // panel * panel
    beside = torch.where(rows < whole, panel, outputs - whole)  # outputs of the panel
    first = rows // panel * (panel * vectors * 4) + rows % panel * 4
    place = torch.arange(vectors, device=rows.device) * 4
    offsets = first[:, None, None] + place[None, :, None] * beside[:, None, None] + torch.arange(4, device=rows.device)
    return _integers(q_weight.reshape(-1)[offsets].reshape(-1, eighth // 4, bits, 4), bits)


def _integers(vectors: Tensor, bits: int) -> Tensor:
    """(N, blocks, bits, 4) -> (N, K)."""
    if bits == 4:
        u = torch.stack([vectors & 15, vectors >> 4], dim=3)
    else:
        u = torch.stack([vectors[:, :, :2] >> 2 * s & 3 for s in range(4)], dim=3)
        if bits == 3:
            high = torch.stack([vectors[:, :, 2] >> s & 1 for s in range(8)], dim=2)
            u = u.flatten(2) | high.flatten(2) << 2
    return u.flatten(1)


def groups_of(q_weight: Tensor, scale: Tensor) -> Groups:
    """The scales and zero points of a narrow weight, float32; one group where there is a scale per output."""
    by_group = scale.unsqueeze(1) if scale.dim() == 1 else scale
    if by_group.dim() == 3:
        return Groups(by_group[:, :, 0].to(torch.float32), by_group[:, :, 1].to(torch.float32))
    real = by_group.to(torch.float32)
    return Groups(real, torch.full_like(real, float(2 ** (q_weight.shape[1] - 1))))


def integers(q_weight: Tensor) -> Tensor:
    """The int8 (N, K) that a narrow weight with one scale per output stands for."""
    middle = 1 << (q_weight.shape[1] - 1)
    return unpack(q_weight).to(torch.int8) - middle


def as_bytes(q_weight: Tensor) -> Tensor:
    """An int8 weight itself, or the int8 (N, K) of a narrow one with one scale per output."""
    return integers(q_weight) if is_narrow(q_weight) else q_weight


def from_bytes(q_weight: Tensor, bits: int) -> Tensor:
    """The inverse for an int8 weight (N, K) of so many bits: narrow where such a weight is stored so, else itself."""
    if q_weight.dim() != 2 or not fits(q_weight.shape[1], bits):
        return q_weight
    return pack(q_weight + 2 ** (bits - 1), bits)


def as_stored(loaded: Tensor, own: Tensor) -> Tensor:
    """A loaded weight in the form of `own`; as it is where it has other numbers.

    Older versions stored a narrow weight as int8.
    """
    if not is_narrow(own) or loaded.dtype != torch.int8 or loaded.shape != (own.shape[0], columns_of(own)):
        return loaded
    bits = own.shape[1]
    middle = 2 ** (bits - 1)
    return pack(loaded + middle, bits) if bool(((loaded > -middle) & (loaded < middle)).all()) else loaded


@torch.jit.unused
def dequantize(q_weight: Tensor, scale: Tensor) -> Tensor:
    """The float32 weight (N, K)."""
    return _reals(unpack(q_weight), groups_of(q_weight, scale))


def dequantize_rows(q_weight: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    """`dequantize(q_weight, scale)[rows]` without the other rows; int64 (count,) -> float32 (count, K)."""
    by_group = scale.unsqueeze(1) if scale.dim() == 1 else scale
    # An index would take a negative row from the end; `embedding` raises, in exported graphs too.
    own = torch.nn.functional.embedding(rows, by_group.flatten(1)).unflatten(1, by_group.shape[1:])
    return _reals(unpack_rows(q_weight, rows), groups_of(q_weight, own))


def _reals(u: Tensor, by: Groups) -> Tensor:
    grouped = u.to(torch.float32).unflatten(1, (by.scale.shape[1], -1))
    reals: Tensor = (grouped - by.zero_point.unsqueeze(2)) * by.scale.unsqueeze(2)
    return reals.flatten(1)


def store(u: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """The two tensors of a narrow weight whose integers, scales and zero points somebody has chosen.

    Args:
        u: (N, K), whole numbers of [0, 2**bits).
        scale: float32 (N,), or (N, groups), positive; stored as float16 where that has such numbers, and rounded then.
        zero_point: of the shape of (N, groups), whole numbers of [0, 2**bits); None for 2**(bits - 1).
        bits: 4, 3 or 2.
    """
    if scale.dim() == 1 and zero_point is None:
        return pack(u, bits), scale.to(torch.float32).contiguous()
    return _in_two(u, stored_scale(scale), zero_point, bits)


def _in_two(u: Tensor, stored: Tensor, zero_point: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """`store` with scales by group that are of their dtype already."""
    if zero_point is not None:
        stored = torch.stack([stored, zero_point.to(stored.dtype)], dim=2)
    q_weight, stored = pack(u, bits), stored.contiguous()
    check(q_weight, stored)
    return q_weight, stored


def stored_scale(scale: Tensor) -> Tensor:
    """Scales by group as they are stored: float16, or float32 where one of them is no normal float16."""
    half = scale.to(torch.float16)
    return half if bool(_is_normal(half).all()) else scale.to(torch.float32)


def in_half(scale: Tensor) -> Tensor:
    """Each scale by group, float32, as float16 keeps it; those that are no normal float16 as they are."""
    half = scale.to(torch.float16)
    return torch.where(_is_normal(half), half.to(torch.float32), scale)


def _is_normal(half: Tensor) -> Tensor:
    return (half >= HALF_MIN) & torch.isfinite(half)


def quantize(
    weight: Tensor, bits: int, group_size: int | None = None, *, symmetric: bool = True, shares: Shares | None = None
) -> tuple[Tensor, Tensor]:
    """Round a float weight (N, K) to the nearest integers; returns q_weight and scale.

    Args:
        weight: of any float type, finite.
        bits: 4, 3 or 2.
        group_size: inputs that share a scale, one of GROUP_SIZES that divides K; None for a scale per output.
        symmetric: integers of ±(2**(bits - 1) - 1) around 0; else all 2**bits, from the group's minimum to its maximum.
        shares: of each group, how much of that range the integers span, beyond which is clipped. None for all of it.
    """
    q_weight, scale = _quantize(weight, bits, group_size, symmetric, shares, halves=True)
    if scale is None:
        q_weight, scale = _quantize(weight, bits, group_size, symmetric, shares, halves=False)
    assert scale is not None
    return q_weight, scale


def _quantize(
    weight: Tensor, bits: int, group_size: int | None, symmetric: bool, shares: Shares | None, *, halves: bool
) -> tuple[Tensor, Tensor | None]:
    """`quantize`, some rows at a time; without a scale where some of its slices fit float16 and others do not."""
    rows, columns = weight.shape
    if not fits(columns, bits):
        raise ValueError(f"{columns} inputs of {bits} bits, expected a multiple of {BLOCK} of {NARROW_BITS} bits")
    # The bytes of a panel lie together, and a slice has whole panels. Both tensors are there before the slices' own
    # memory comes and goes: what is kept of each slice would lie between, and none of that could be given back.
    flat, place = torch.empty(rows * bits * columns // 8, dtype=torch.uint8), 0
    beside = () if group_size is None else (columns // group_size, *(() if symmetric else (2,)))
    scales = {one: torch.empty((rows, *beside), dtype=one) for one in (torch.float16, torch.float32)}
    used = set()
    for first, part in row_slices(weight):
        q_weight, scale = _quantize_rows(part, bits, group_size, symmetric, shares, halves=halves)
        flat[place : place + q_weight.numel()] = q_weight.flatten()
        place += q_weight.numel()
        scales[scale.dtype][first : first + len(scale)] = scale
        used.add(scale.dtype)
    return flat.view(rows, bits, columns // 8), scales[used.pop()] if len(used) == 1 else None


def _quantize_rows(
    weight: Tensor, bits: int, group_size: int | None, symmetric: bool, shares: Shares | None, *, halves: bool
) -> tuple[Tensor, Tensor]:
    """`quantize` of float32 (N, K); scales by group are float16 where that holds them and `halves` allows it."""
    if group_size is None:
        q, scale = quantize_weight(weight, bits=bits)
        return pack(q + 2 ** (bits - 1), bits), scale
    grouped = weight.unflatten(1, (-1, group_size))
    middle, zero_point = 2 ** (bits - 1), None
    share = 1.0 if shares is None else shares(grouped)
    if symmetric:
        bound = grouped.abs().amax(dim=2) * share
        scale = divided(bound, middle - 1)
        scale = torch.where(bound == 0, torch.ones_like(scale), scale.clamp(min=SCALE_MIN))
    else:
        low, high = grouped.amin(dim=2).clamp(max=0.0) * share, grouped.amax(dim=2).clamp(min=0.0) * share
        scale = affine_qparams(low, high, 0, 2 * middle - 1)[0]
        scale = torch.where(low == high, torch.ones_like(scale), scale)
    stored = stored_scale(scale) if halves else scale
    inverse = (1.0 / stored.to(torch.float32)).unsqueeze(2)
    if symmetric:
        u = (torch.round(grouped * inverse) + middle).clamp(1, 2 * middle - 1)
    else:
        zero_point = torch.round(-low * inverse.squeeze(2)).clamp(0, 2 * middle - 1)
        u = (torch.round(grouped * inverse) + zero_point.unsqueeze(2)).clamp(0, 2 * middle - 1)
    return _in_two(u.flatten(1), stored, zero_point, bits)
