"""Keys and values that are kept as int8, by the extension and by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quant.kernels import ops, reference_cache
from quant.kernels.reference_cache import empty_cache, read_byte_cache
from torch import Tensor

needs_extension = pytest.mark.skipif(bool(ops.extension_problem()), reason=ops.extension_problem() or "built")
IMPLEMENTATIONS: dict[str, Any] = {"operator": torch.ops.octet, "reference": reference_cache}
implementations = pytest.mark.parametrize("cache", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())

# batch, heads that are kept, heads that share one, queries, width, width of the values, capacity, tokens
SHAPES = {
    "one query": (1, 2, 4, 1, 64, 64, 64, 38),
    "several": (2, 3, 1, 5, 20, 7, 48, 16),
    "more rows than go together": (1, 1, 3, 3, 5, 70, 32, 32),
    "one key": (2, 1, 1, 1, 1, 1, 16, 1),
    "many keys": (1, 2, 5, 1, 33, 96, 320, 301),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def filled(cache: Any, shape: tuple[int, ...]) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Keys, values and their scales, written in two parts; queries; and the keys and values that they were."""
    batch, kept, shared, queries, width, mixed, capacity, tokens = shape
    g = torch.Generator().manual_seed(tokens)
    q, k = (
        torch.randn(batch, kept * shared, queries, width, generator=g),
        torch.randn(batch, kept, tokens, width, generator=g),
    )
    v = torch.randn(batch, tokens, kept, mixed, generator=g).transpose(1, 2)  # as projections give it
    parts = [
        *empty_cache(batch, kept, capacity, width, blocked=True),
        *empty_cache(batch, kept, capacity, mixed, blocked=False),
    ]
    first = tokens * 2 // 3
    for start, end in ((0, first), (first, tokens)):
        cache.write_byte_cache(k[:, :, start:end], start, *parts[:2])
        cache.write_byte_cache(v[:, :, start:end], start, *parts[2:])
    return parts, q, k, v


@implementations
@shapes
def test_what_is_read_is_within_half_a_step_of_what_was_written(cache: Any, shape: tuple[int, ...]) -> None:
    parts, _, k, v = filled(cache, shape)
    for written, q, scale in ((k, *parts[:2]), (v, *parts[2:])):
        read = read_byte_cache(q, scale, shape[-1])
        step = written.abs().amax(-1, keepdim=True) / 127
        assert torch.equal(scale[:, :, : shape[-1], None], step)
        assert bool(((read - written).abs() <= 0.5001 * step).all())


@implementations
@shapes
@pytest.mark.parametrize("how", ["all", "causal", "bias", "forbidden"])
def test_attention_is_that_of_the_reals_that_are_kept(cache: Any, shape: tuple[int, ...], how: str) -> None:
    parts, q, _, _ = filled(cache, shape)
    queries, length = shape[3], shape[-1]
    g = torch.Generator().manual_seed(1)
    mask = torch.randn(shape[0], 1, queries, length, generator=g) if how in ("bias", "forbidden") else None
    if mask is not None and how == "forbidden":
        mask = mask.masked_fill(mask > 0, -torch.inf)
        mask[..., 0] = 0.0
    y = cache.attend_byte_cache(q, *parts, length, 0.3, how == "causal", mask)
    k, v = (read_byte_cache(*parts[at : at + 2], length).double().repeat_interleave(shape[2], 1) for at in (0, 2))
    if how == "causal":
        mask = torch.full((queries, length), -torch.inf).triu(length - queries + 1)
    exact = F.scaled_dot_product_attention(q.double(), k, v, None if mask is None else mask.double(), scale=0.3)
    assert y.is_contiguous()
    assert float((y - exact).abs().max()) < 2e-6 * float(exact.abs().max() + 1)


@implementations
def test_a_query_that_may_see_nothing_gives_zeros(cache: Any) -> None:
    parts, q, _, _ = filled(cache, SHAPES["several"])
    mask = torch.zeros(2, 1, 5, 16)
    mask[1, 0, 3] = -torch.inf
    y = cache.attend_byte_cache(q, *parts, 16, 1.0, False, mask)
    assert bool((y[1, :, 3] == 0).all())
    assert bool((y[0] != 0).all())


@implementations
def test_what_is_not_finite_is_seen_where_it_is_and_nowhere_else(cache: Any) -> None:
    parts, q, k, _ = filled(cache, SHAPES["one query"])
    k = k.clone()
    k[0, 1, 5, 3] = torch.inf
    cache.write_byte_cache(k, 0, *parts[:2])
    y = cache.attend_byte_cache(q, *parts, 38, 1.0, False, None)
    assert bool(y[:, :4].isfinite().all())
    assert bool(y[:, 4:].isnan().all())


@needs_extension
@shapes
def test_the_extension_keeps_the_integers_of_the_reference(shape: tuple[int, ...]) -> None:
    one, other = (filled(cache, shape)[0] for cache in IMPLEMENTATIONS.values())
    for at in (0, 2):
        assert torch.equal(*(read_byte_cache(*parts[at : at + 2], shape[-1]) for parts in (one, other)))


@needs_extension
def test_threads_change_no_bit() -> None:
    parts, q, _, _ = filled(torch.ops.octet, (2, 8, 4, 2, 64, 64, 2048, 2000))
    torch.set_num_threads(1)
    one = torch.ops.octet.attend_byte_cache(q, *parts, 2000, 0.1, True, None)
    torch.set_num_threads(3)
    assert torch.equal(one, torch.ops.octet.attend_byte_cache(q, *parts, 2000, 0.1, True, None))


def wrong(**other: Any) -> tuple[Any, ...]:
    parts, q, _, _ = filled(reference_cache, SHAPES["several"])
    named = dict(zip(("keys", "key_scale", "values", "value_scale"), parts, strict=True))
    call = {"q": q, **named, "length": 16, "scale": 1.0, "causal": False, "mask": None}
    return tuple({**call, **other}.values())


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no keys": ({"length": 0}, ValueError, "length is 0, expected 1 to 48"),
    "more than there is room for": ({"length": 49}, ValueError, "length is 49, expected 1 to 48"),
    "later queries than keys": ({"length": 4, "causal": True}, ValueError, "5 queries are causal, and the cache has 4"),
    "reals": ({"keys": torch.zeros(2, 3, 3, 20, 16)}, TypeError, "keys is "),
    "values as keys lie": ({"values": torch.zeros(2, 3, 3, 7, 16, dtype=torch.int8)}, ValueError, "values"),
    "other heads": ({"q": torch.zeros(2, 4, 5, 20)}, ValueError, "a multiple of 3 heads"),
    "queries of another width": ({"q": torch.zeros(2, 3, 5, 21)}, ValueError, "q has shape"),
    "half a scale": ({"key_scale": torch.zeros(2, 3, 40)}, ValueError, "the scale of keys has shape"),
    "flags for a mask": ({"mask": torch.zeros(2, 1, 5, 16, dtype=torch.bool)}, TypeError, "mask"),
}


@implementations
@pytest.mark.parametrize(("other", "error", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_does_not_go_together_is_refused(
    cache: Any, other: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cache.attend_byte_cache(*wrong(**other))


@implementations
@pytest.mark.parametrize("start", [-1, 40])
def test_tokens_that_find_no_room_are_refused(cache: Any, start: int) -> None:
    parts = empty_cache(1, 2, 48, 4, blocked=True)
    with pytest.raises(ValueError, match=f"9 tokens from place {start} on do not fit a cache of 48"):
        cache.write_byte_cache(torch.zeros(1, 2, 9, 4), start, *parts)


def test_room_for_a_part_of_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity is 20, expected a multiple of 16"):
        empty_cache(1, 1, 20, 4, blocked=True)
