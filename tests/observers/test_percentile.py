"""PercentileObserver against order statistics of the values themselves."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant.kernels import weight_scheme
from quant.observers import MinMaxObserver, PercentileObserver

EXAMPLES = 20 if os.environ.get("OCTET_FAST_TESTS") == "1" else 100
values_of = st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=60)


@settings(max_examples=EXAMPLES)
@given(values=values_of, percentile=st.sampled_from([60.0, 90.0, 99.0, 99.99, 100.0]))
def test_each_end_is_at_most_a_bin_outside_the_order_statistic(values: list[float], percentile: float) -> None:
    observer = PercentileObserver(percentile=percentile)
    observer(torch.tensor(values))
    (exponent,) = observer.exponents()
    assert exponent is not None
    width = 2.0**exponent

    def size(value: float) -> float:
        return width if abs(value) >= width else 2 * width

    rank = max(math.ceil((0.5 + percentile / 200.0) * len(values)), 1)
    ordered = sorted(values)
    exact_high, exact_low = ordered[rank - 1], ordered[-rank]
    low, high = (float(end) for end in observer.range())
    assert exact_low - size(exact_low) <= low <= exact_low
    assert exact_high <= high <= exact_high + size(exact_high)


@settings(max_examples=EXAMPLES)
@given(values=values_of, percentile=st.sampled_from([60.0, 99.0, 100.0]))
def test_a_symmetric_scheme_takes_the_magnitude(values: list[float], percentile: float) -> None:
    scheme = weight_scheme(8, None)
    observer = PercentileObserver(scheme, percentile=percentile)
    observer(torch.tensor(values))
    (exponent,) = observer.exponents()
    assert exponent is not None
    rank = max(math.ceil(percentile / 100.0 * len(values)), 1)
    exact = sorted(abs(value) for value in values)[rank - 1]
    reached = max(-float(observer.range()[0]), float(observer.range()[1]))
    assert exact <= reached <= exact + 2.0**exponent


def test_a_hundred_percent_is_min_max() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    observer, extremes = PercentileObserver(percentile=100.0), MinMaxObserver()
    observer(x)
    extremes(x)
    assert observer.qparams() == extremes.qparams()


def test_outliers_beyond_the_share_are_left_out() -> None:
    x = torch.cat((torch.linspace(0, 1, 100_000), torch.tensor([1000.0])))
    observer = PercentileObserver()
    observer(x)
    assert float(observer.range()[1]) < 1.5


@pytest.mark.parametrize("percentile", [50.0, 0.9999, 100.1, math.nan])
def test_a_percentile_outside_its_interval_is_refused(percentile: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        PercentileObserver(percentile=percentile)
