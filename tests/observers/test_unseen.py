"""What a range leaves for values that calibration has not seen."""

from __future__ import annotations

import pytest
import torch
from quant.kernels import weight_scheme
from quant.observers import HistogramObserver, MSEObserver, Observer
from quant.observers._unseen import WIDEST, Unseen
from torch import Tensor


def observed(x: Tensor, observer: Observer | None = None) -> tuple[float, float]:
    made = HistogramObserver() if observer is None else observer
    made(x)
    low, high = made.range()
    return float(low), float(high)


def noise(x: Tensor, seen: Tensor, *, reach: bool) -> float:
    """Mean squared error of `x`, rounded by a range of what was seen, with and without what lies beyond."""
    observer = HistogramObserver()
    observer(seen)
    if not reach:
        observer.give(float(seen.min()), float(seen.max()))
    qparams = observer.qparams()
    return float((qparams.dequantize(qparams.quantize(x)) - x).double().square().mean())


@pytest.mark.parametrize("count", [64, 512])
@pytest.mark.parametrize("tail", ["gauss", "laplace"])
def test_a_small_sample_loses_less_of_the_next_one(count: int, tail: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(size: int) -> Tensor:
        x = torch.randn(size, generator=generator)
        return x if tail == "gauss" else x * torch.randn(size, generator=generator).abs() * 2

    fresh = draw(100_000)
    lost = torch.tensor(
        [[noise(fresh, seen, reach=reach) for reach in (True, False)] for seen in map(draw, [count] * 20)]
    )
    assert lost[:, 0].mean() < 0.7 * lost[:, 1].mean()


def test_a_large_sample_has_the_range_with_the_least_error() -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    low, high = observed(x)
    assert low > float(x.min())
    assert high < float(x.max())


@pytest.mark.parametrize(
    ("x", "ends"),
    [
        (torch.randn(500).clamp(-1, 1), (-1.0, 1.0)),
        (torch.tensor([0.0, 1.0]).repeat(20), (0.0, 1.0)),
        (torch.zeros(9), (0.0, 0.0)),
        (torch.full((1,), 3.0), (0.0, 3.0)),
    ],
    ids=["clamped", "one_hot", "zeros", "one_value"],
)
def test_where_the_largest_values_are_equal_nothing_lies_beyond(x: Tensor, ends: tuple[float, float]) -> None:
    observer = HistogramObserver()
    observer(x)
    low, high = observer.qparams().dequantize(torch.tensor([0, 255], dtype=torch.uint8)).tolist()
    assert (low, high) == pytest.approx(ends, abs=1e-2)


def test_zeros_say_nothing_of_the_tail() -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).relu()
    assert observed(x) == observed(torch.cat((x, torch.zeros(10_000))))


def test_a_range_reaches_no_further_than_a_quarter_of_what_was_seen() -> None:
    x = torch.cat((torch.zeros(4), torch.tensor([1.0, 8.0, 64.0, 512.0])))
    assert observed(x)[1] <= (1 + WIDEST) * 512


def test_weights_have_no_more_to_come() -> None:
    x = torch.randn(27, generator=torch.Generator().manual_seed(0))
    for observer in (HistogramObserver(weight_scheme(8, None)), MSEObserver(weight_scheme(8, None))):
        low, high = observed(x, observer)
        assert max(-low, high) <= float(x.abs().max())


@pytest.mark.parametrize("room", [0.0, 0.5, 2.0, -0.3])
def test_the_error_is_that_of_an_exponential_tail(room: float) -> None:
    excess = torch.distributions.Exponential(1 / 0.7).icdf((torch.arange(400_000) + 0.5) / 400_000).double()
    expected = (excess - room).clamp(min=0.0).square().mean() if room >= 0 else (excess - room).square().mean()
    found = Unseen(0.0, 5.0, above=0.7).error(torch.zeros(1).double(), torch.tensor([5.0 + room]).double())
    assert float(found) == pytest.approx(float(expected), rel=1e-3)
