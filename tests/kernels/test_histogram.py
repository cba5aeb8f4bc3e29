"""The histogram operator: the reference against the definition, and the compiled one against the reference, exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant.kernels import histogram, observe_histogram
from quant.kernels import reference_histogram as ref
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max
WIDTHS = st.integers(-126, 126).map(lambda e: 2.0**e)
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, LARGEST, -LARGEST, 2.0**-149)


def values(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def counts_by_definition(x: list[float], width: float, bins: int) -> Tensor:
    """A value at a time, in Python's exact arithmetic."""
    counts = torch.zeros(bins, dtype=torch.int64)
    for value in filter(math.isfinite, x):
        counts[max(0, min(bins - 1, math.trunc(value / width) + bins // 2))] += 1
    return counts


def agree(x: Tensor, width: float, bins: int) -> None:
    for actual, expected in zip(histogram(x, width, bins), ref.histogram(x, width, bins), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


@settings(max_examples=100)
@given(st.lists(st.floats(width=32), max_size=70), WIDTHS, st.sampled_from([2, 64, 4096, 32768]))
def test_any_values_on_any_grid(x: list[float], width: float, bins: int) -> None:
    tensor = torch.tensor(x, dtype=torch.float32)
    extremes, non_finite, counts = histogram(tensor, width, bins)
    finite = [value for value in x if math.isfinite(value)]
    assert torch.equal(counts, counts_by_definition(x, width, bins))
    assert extremes.tolist() == [min(finite, default=math.inf), max(finite, default=-math.inf)]
    assert non_finite.tolist() == [sum(map(math.isnan, x)), sum(map(math.isinf, x))]
    agree(tensor, width, bins)


@pytest.mark.parametrize("count", [0, 1, 7, 15, 16, 17, 31, 33, 2047, 2048, 2049, 3 * 2048 + 5])
def test_any_length(count: int) -> None:
    agree(values(count), 2.0**-9, 4096)
    agree(values(count).abs() + 1.0, 2.0**-9, 4096)


def test_edges_of_bins() -> None:
    edges = torch.arange(-40, 41, dtype=torch.float32) / 8
    agree(torch.cat([edges, edges.nextafter(torch.tensor(9.0)), edges.nextafter(torch.tensor(-9.0))]), 0.125, 64)


@pytest.mark.parametrize("special", SPECIAL, ids=str)
@pytest.mark.parametrize("place", [0, 20, 2047, 2048, 4999])
def test_a_special_value_anywhere(special: float, place: int) -> None:
    x = values(5000)
    x[place] = special
    agree(x, 2.0**-9, 4096)


def test_more_equal_values_than_16_bits_can_count() -> None:
    agree(torch.cat([torch.zeros(900_000), values(1000)]), 2.0**-9, 4096)


def test_blocks_that_are_cut_short_by_nan() -> None:
    # 2047 of 2048 values stay, so that the counts of what is left over pile up in one place.
    x = torch.zeros(300 * 2048)
    x[::2048] = math.nan
    agree(x, 1.0, 64)


def test_threads_give_the_same_counts() -> None:
    x = values(400_000)
    x[77] = math.nan
    one = histogram(x, 2.0**-9, 4096)
    torch.set_num_threads(4)
    for actual, expected in zip(histogram(x, 2.0**-9, 4096), one, strict=True):
        assert torch.equal(actual, expected)


def state(rows: int, bins: int) -> tuple[Tensor, ...]:
    """low, high, nan_count, inf_count, counts, of nothing seen."""
    counts = torch.zeros(rows, bins, dtype=torch.int64)
    non_finite = (torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64))
    return torch.full((rows,), math.inf), torch.full((rows,), -math.inf), *non_finite, counts


@pytest.mark.parametrize("bins", [64, 4096, 32768])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_state_takes_in_batches(rows: int, bins: int) -> None:
    mine, theirs = state(rows, bins), state(rows, bins)
    not_finite, total = values(3000, 3), 0
    not_finite[::7], not_finite[5] = math.nan, -math.inf
    for size, x in enumerate(
        [
            torch.full((30,), math.nan),
            torch.zeros(30),
            values(3000) * 1e-44,
            values(6000),
            not_finite,
            values(3000, 1).abs() * 100,
            -values(9000, 2).abs() * 1e-3,
            torch.tensor([LARGEST, -1.0, 2.0]),
            values(3000, 4),
        ]
    ):
        batch = x.reshape(3, -1)[:rows].clone() if rows > 1 else x[None]
        observe_histogram(batch, *mine)
        ref.observe_histogram(batch, *theirs)
        for actual, expected in zip(mine, theirs, strict=True):
            assert torch.equal(actual, expected), size
        total += batch.numel()
        assert sum(int(count.sum()) for count in mine[2:]) == total


def test_one_bin_that_most_values_share() -> None:
    for value in (0.0, 2.5, -3.0):
        mine, theirs = state(1, 4096), state(1, 4096)
        x = torch.cat([torch.full((300_000,), value), values(1000)])[None]
        observe_histogram(x, *mine)
        ref.observe_histogram(x, *theirs)
        assert torch.equal(mine[-1], theirs[-1])


def test_a_state_of_another_shape(extension: None) -> None:
    with pytest.raises(ValueError, match="low has shape"):
        observe_histogram(torch.zeros(2, 5), *state(3, 64))
    with pytest.raises(ValueError, match="two dimensions"):
        observe_histogram(torch.zeros(5), *state(1, 64))


def test_strided_input() -> None:
    agree(values(3000)[::3], 2.0**-9, 4096)


@pytest.mark.parametrize(
    ("x", "width", "bins", "message"),
    [
        (torch.zeros(2, 2), 1.0, 64, "one dimension"),
        (torch.zeros(2), 0.3, 64, "power of two"),
        (torch.zeros(2), 0.0, 64, "power of two"),
        (torch.zeros(2), 2.0**-127, 64, "power of two"),
        (torch.zeros(2), 1.0, 63, "bins is 63"),
        (torch.zeros(2), 1.0, 65536, "bins is 65536"),
    ],
)
def test_bad_input(extension: None, x: Tensor, width: float, bins: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        histogram(x, width, bins)


def test_bad_dtype(extension: None) -> None:
    with pytest.raises(TypeError, match="expected Float"):
        histogram(torch.zeros(2, dtype=torch.float64), 1.0, 64)
