"""The histogram: bins where they should be, exact widening, and a state that depends on the values alone."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant.kernels.reference_histogram import EXPONENT_MIN, grid_exponent, widen
from quant.observers import HistogramObserver
from quant.observers._histogram_store import RowView

EXAMPLES = 20 if os.environ.get("OCTET_FAST_TESTS") == "1" else 100
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def counts_ref(values: list[float], width: float, bins: int) -> torch.Tensor:
    """The definition, a value at a time, in Python's doubles."""
    counts = torch.zeros(bins, dtype=torch.int64)
    for value in values:
        counts[math.trunc(value / width) + bins // 2] += 1
    return counts


@settings(max_examples=EXAMPLES)
@given(values=st.lists(finite, min_size=1, max_size=50), bins=st.sampled_from([64, 1024, 4096, 32768]))
def test_one_batch_is_the_definition(values: list[float], bins: int) -> None:
    observer = HistogramObserver(bins=bins)
    observer(torch.tensor(values))
    (exponent,) = observer.exponents()
    assert exponent == grid_exponent(max(abs(value) for value in values), bins)
    assert torch.equal(observer.counts[0], counts_ref(values, 2.0**exponent, bins))


@settings(max_examples=EXAMPLES)
@given(batches=st.lists(st.lists(finite, min_size=1, max_size=5), min_size=1, max_size=8), order=st.randoms())
def test_order_and_batches_do_not_matter(batches: list[list[float]], order) -> None:  # type: ignore[no-untyped-def]
    joint, streamed = HistogramObserver(bins=64), HistogramObserver(bins=64)
    joint(torch.tensor([value for batch in batches for value in batch]))
    order.shuffle(batches)
    for batch in batches:
        streamed(torch.tensor(batch))
    assert torch.equal(joint.counts, streamed.counts)
    assert torch.equal(joint.low, streamed.low)
    assert torch.equal(joint.high, streamed.high)


@given(bound=st.floats(0, float(torch.finfo(torch.float32).max), width=32), bins=st.sampled_from([64, 4096]))
def test_the_exponent_is_the_smallest_that_fits(bound: float, bins: int) -> None:
    exponent = grid_exponent(bound, bins)
    assert bound < bins // 2 * 2.0**exponent
    assert exponent == EXPONENT_MIN or bound >= bins // 2 * 2.0 ** (exponent - 1)


def test_a_bound_on_a_power_of_two_opens_the_next_octave() -> None:
    assert 2.0 ** grid_exponent(1.0, 64) == 2 / 32
    assert 2.0 ** grid_exponent(math.nextafter(1.0, 0.0), 64) == 1 / 32


@pytest.mark.parametrize("doublings", [0, 1, 5, 6, 40, 250])
def test_widening_moves_every_count(doublings: int) -> None:
    counts = torch.arange(64)
    counts[0] = 0
    wide = widen(counts, doublings)
    expected = torch.zeros(64, dtype=torch.int64)
    for index in range(64):
        expected[int((index - 32) / 2.0**doublings) + 32] += index
    assert torch.equal(wide, expected)


def test_counts_beyond_what_float32_can_count() -> None:
    observer = HistogramObserver(bins=64)
    observer(torch.ones(1))
    observer.counts[0, 32] = 2**24
    observer(torch.zeros(3))
    assert int(observer.counts[0, 32]) == 2**24 + 3


def test_a_wider_batch_with_values_that_are_not_finite() -> None:
    observer = HistogramObserver(bins=64)
    observer(torch.tensor([0.5, math.nan]))
    observer(torch.tensor([math.inf, -40.0, math.nan, -math.inf, 0.5]))
    expected = HistogramObserver(bins=64)
    expected(torch.tensor([0.5, -40.0, 0.5]))
    assert torch.equal(observer.counts, expected.counts)
    assert (float(observer.low), float(observer.high)) == (-40.0, 0.5)
    assert (int(observer.nan_count), int(observer.inf_count)) == (2, 2)


def test_a_dynamic_range_of_80_octaves_loses_no_value() -> None:
    observer = HistogramObserver()
    x = 2.0 ** torch.arange(-40, 40, dtype=torch.float32)
    for value in x:
        observer(value)
    assert int(observer.counts.sum()) == 80
    assert float(observer.range()[1]) > 2.0**37
    observer.qparams()


def test_values_too_small_for_a_normal_width() -> None:
    observer = HistogramObserver()
    observer(torch.tensor([1e-44, -1e-44, 2.0**-120, -(2.0**-120)]))
    assert observer.exponents() == [EXPONENT_MIN]
    assert observer.counts[0, [2048 - 64, 2048, 2048 + 64]].tolist() == [1, 2, 1]


def test_zeros_before_small_values_do_not_set_the_grid() -> None:
    first, last = HistogramObserver(), HistogramObserver()
    small = torch.tensor([1e-20, -3e-20])
    for observer, batches in ((first, (torch.zeros(5), small)), (last, (small, torch.zeros(5)))):
        for batch in batches:
            observer(batch)
    assert torch.equal(first.counts, last.counts)
    assert int((first.counts > 0).sum()) == 3


def test_the_state_does_not_grow() -> None:
    observer = HistogramObserver()
    size = sum(buffer.nbytes for buffer in observer.buffers())
    for scale in (1e-5, 1.0, 1e20):
        observer(scale * torch.ones(1000))
    assert sum(buffer.nbytes for buffer in observer.buffers()) == size < 33_000


@pytest.mark.parametrize("bins", [63, 32, 65536, 0, -64])
def test_bins_that_are_no_power_of_two_are_refused(bins: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        HistogramObserver(bins=bins)


def test_a_row_reads_back_in_real_numbers() -> None:
    counts = torch.zeros(64, dtype=torch.int64)
    counts[32 - 3], counts[32], counts[32 + 2] = 1, 2, 3
    row = RowView(counts, 0.5, -1.9, 1.2)
    assert row.magnitudes[:5].tolist() == [2, 0, 3, 1, 0]
    assert row.centers[[29, 32, 34]].tolist() == [-1.75, 0.0, 1.2]
    assert row.lower_edges[[29, 32, 34]].tolist() == [-1.9, -0.5, 1.0]
    assert row.upper_edges[[29, 32, 34]].tolist() == [-1.5, 0.5, 1.2]
