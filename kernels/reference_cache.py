"""What attention keeps of earlier tokens as int8, in plain torch.

Keys and values are symmetric, with a scale for each token and head: the largest magnitude over 127, as weights have
it for each output. Values lie as they come. Keys lie in blocks of 16 tokens, the first value of each of these, then the
second, and so on, so that one load has a value of sixteen keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
"""Keys of a block."""

MOST = 127


def empty_cache(batch: int, heads: int, capacity: int, width: int, *, blocked: bool) -> tuple[Tensor, Tensor]:
    """Room for `capacity` tokens, a multiple of BLOCK, whose values nobody has written: a cache and its scale.

    Returns:
        int8 (batch, heads, capacity / 16, width, 16) where it is `blocked`, as keys are, else (batch, heads, capacity,
        width); and float32 (batch, heads, capacity).
    """
    if capacity < 0 or capacity % BLOCK:
        raise ValueError(f"capacity is {capacity}, expected a multiple of {BLOCK}")
    sizes = (capacity // BLOCK, width, BLOCK) if blocked else (capacity, width)
    return torch.empty((batch, heads, *sizes), dtype=torch.int8), torch.empty(batch, heads, capacity)


def read_byte_cache(cache: Tensor, scale: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a cache as reals, float32 (batch, heads, length, width)."""
    if cache.dim() == 5:
        blocks = -(-length // BLOCK)
        cache = cache[:, :, :blocks].transpose(3, 4).flatten(2, 3)
    return cache[:, :, :length].float() * scale[:, :, :length, None]


def write_byte_cache(x: Tensor, start: int, cache: Tensor, scale: Tensor) -> None:
    """Round tokens to int8, and write them to a cache.

    Each row of x is round(x / scale), its scale max|x| / 127, or 1 for a row of zeros. A row that is not finite has a
    scale of NaN.

    Args:
        x: float32 (batch, heads, tokens, width).
        start: place of the first token.
        cache, scale: as `empty_cache` gives them; written in place.

    Raises:
        TypeError: a dtype is another.
        ValueError: a shape is another, or there is no room for so many tokens.
    """
    batch, heads, capacity, width = _checked(cache, scale, "cache")
    if x.dtype != torch.float32:
        raise TypeError(f"x is {x.dtype}, expected torch.float32")
    if x.dim() != 4 or (*x.shape[:2], x.shape[3]) != (batch, heads, width):
        raise ValueError(f"x has shape {tuple(x.shape)}, expected ({batch}, {heads}, tokens, {width})")
    tokens = x.shape[2]
    if not 0 <= start <= capacity - tokens:
        raise ValueError(f"{tokens} tokens from place {start} on do not fit a cache of {capacity}")
    if not x.numel():
        return
    most = x.abs().amax(-1)
    by = torch.where(most == 0, 1.0, most / MOST).masked_fill(~most.isfinite(), torch.nan)
    values = (x / by[..., None]).round().clamp(-MOST, MOST).nan_to_num(1.0).to(torch.int8)
    scale[:, :, start : start + tokens] = by
    if cache.dim() == 4:
        cache[:, :, start : start + tokens] = values
        return
    places = torch.arange(start, start + tokens)
    cache[:, :, places // BLOCK, :, places % BLOCK] = values.permute(2, 0, 1, 3)


def attend_byte_cache(
    q: Tensor,
    keys: Tensor,
    key_scale: Tensor,
    values: Tensor,
    value_scale: Tensor,
    length: int,
    scale: float,
    causal: bool,
    mask: Tensor | None = None,
) -> Tensor:
    """softmax(q k' * scale + mask) v over what a cache holds (Vaswani et al. 2017, arXiv 1706.03762, equation 1).

    Args:
        q: float32 (batch, heads, queries, width); `heads` is a multiple of the cache's, and neighbours share its heads
            (Ainslie et al. 2023, arXiv 2305.13245).
        keys, key_scale, values, value_scale: as `empty_cache` gives them, keys in blocks.
        length: tokens that the cache holds, the new ones among them.
        scale: of the scores.
        causal: query i sees the keys before length - queries + i + 1.
        mask: float32 that broadcasts to (batch, heads, queries, length), or None. A query that it forbids all keys
            gives zeros.

    Returns:
        float32 (batch, heads, queries, width of the values), contiguous.

    Raises:
        TypeError: a dtype is another.
        ValueError: shapes do not go together.
    """
    batch, kept, capacity, width = _checked(keys, key_scale, "keys")
    if values.dim() != 4 or keys.dim() != 5 or _checked(values, value_scale, "values")[:3] != (batch, kept, capacity):
        raise ValueError(
            f"keys have shape {tuple(keys.shape)} and values {tuple(values.shape)}, expected (batch, heads, blocks, "
            f"width, {BLOCK}) and (batch, heads, {BLOCK} * blocks, width)"
        )
    if q.dtype != torch.float32 or (mask is not None and mask.dtype != torch.float32):
        raise TypeError(f"q is {q.dtype} and mask {None if mask is None else mask.dtype}, expected torch.float32")
    if q.dim() != 4 or not kept or (q.shape[0], q.shape[1] % kept, q.shape[3]) != (batch, 0, width):
        raise ValueError(
            f"q has shape {tuple(q.shape)}, expected ({batch}, a multiple of {kept} heads, queries, {width})"
        )
    queries = q.shape[2]
    if not 0 < length <= capacity:
        raise ValueError(f"length is {length}, expected 1 to {capacity}")
    if causal and queries > length:
        raise ValueError(f"{queries} queries are causal, and the cache has {length} keys")
    k, v = read_byte_cache(keys, key_scale, length), read_byte_cache(values, value_scale, length)
    shared = q.shape[1] // kept
    scores = (q @ k.repeat_interleave(shared, 1).transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        later = torch.ones(queries, length, dtype=torch.bool).triu(length - queries + 1)
        scores = scores.masked_fill(later, -torch.inf)
    forbidden = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(forbidden, 0.0)
    return (weights @ v.repeat_interleave(shared, 1)).contiguous()


def _checked(cache: Tensor, scale: Tensor, name: str) -> tuple[int, int, int, int]:
    """Batch, heads, capacity and width of a cache and its scale."""
    if cache.dtype != torch.int8 or scale.dtype != torch.float32:
        raise TypeError(f"{name} is {cache.dtype} and its scale {scale.dtype}, expected torch.int8 and torch.float32")
    blocked = cache.dim() == 5
    if cache.dim() not in (4, 5) or (blocked and cache.shape[4] != BLOCK) or not cache.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(cache.shape)}, expected contiguous (batch, heads, capacity, width), or (batch, "
            f"heads, blocks, width, {BLOCK}) of keys"
        )
    batch, heads, capacity, width = cache.shape[:4]
    capacity *= BLOCK if blocked else 1
    if scale.shape != (batch, heads, capacity) or not scale.is_contiguous():
        raise ValueError(
            f"the scale of {name} has shape {tuple(scale.shape)}, expected contiguous ({batch}, {heads}, {capacity})"
        )
    return batch, heads, capacity, width
