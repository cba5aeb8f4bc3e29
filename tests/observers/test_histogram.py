"""HistogramObserver: no range that a full grid finds is better than the bound allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from quant.kernels import ACTIVATION_U8, QScheme, choose_qparams, weight_scheme
from quant.observers import HistogramObserver
from quant.observers._range_search import best_range, squared_error
from torch import Tensor

FOUR_BITS = QScheme(torch.uint8, 0, 15, symmetric=False)
N = 20_000


def uniform(n: int = N) -> Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(0)).clamp(1e-6, 1 - 1e-6)


def gauss() -> Tensor:
    return torch.special.ndtri(uniform())


DATA: dict[str, Callable[[], Tensor]] = {
    "gauss": gauss,
    "relu": lambda: gauss().relu(),
    "laplace": lambda: gauss() * gauss().roll(1).abs() * 2,
    "shifted": lambda: gauss() + 3,
    "negative": lambda: -gauss().abs() - 1,
    "outlier": lambda: torch.cat((gauss(), torch.tensor([60.0]))),
    "two_peaks": lambda: torch.cat((gauss() / 10 - 1, gauss() / 5 + 4)),
}
every_data = pytest.mark.parametrize("data", list(DATA.values()), ids=list(DATA))
every_scheme = pytest.mark.parametrize(
    "scheme",
    [ACTIVATION_U8, FOUR_BITS, weight_scheme(8, None), weight_scheme(3, None)],
    ids=["u8", "u4", "s8", "s3"],
)


def rms(x: Tensor, low: Tensor, high: Tensor, scheme: QScheme) -> float:
    qparams = choose_qparams(low, high, scheme)
    return float((qparams.dequantize(qparams.quantize(x)) - x).double().square().mean().sqrt())


def grid_rms(x: Tensor, scheme: QScheme, steps: int = 24) -> float:
    """The least error over a two-dimensional grid of ranges, on the values themselves."""
    shares = torch.linspace(1 / steps, 1, steps)
    if scheme.symmetric:
        return min(rms(x, -bound, bound, scheme) for bound in x.abs().max() * shares)
    lows = (x.min().clamp(max=0.0) * shares).unique()
    highs = (x.max().clamp(min=0.0) * shares).unique()
    return min(rms(x, low, high, scheme) for low in lows for high in highs)


@every_data
@every_scheme
def test_no_range_of_a_full_grid_is_better_than_the_bound(data: Callable[[], Tensor], scheme: QScheme) -> None:
    x = data()
    observer = HistogramObserver(scheme)
    observer(x)
    (exponent,) = observer.exponents()
    assert exponent is not None
    # 2 w from the docstring; the grid's candidates are not all the search's, which costs at most 2 %.
    assert rms(x, *observer.range(), scheme) <= 1.02 * grid_rms(x, scheme) + 2 * 2.0**exponent


@every_data
@every_scheme
def test_never_worse_than_min_max(data: Callable[[], Tensor], scheme: QScheme) -> None:
    x = data()
    observer = HistogramObserver(scheme)
    observer(x)
    (exponent,) = observer.exponents()
    assert exponent is not None
    assert rms(x, *observer.range(), scheme) <= rms(x, x.min(), x.max(), scheme) + 2 * 2.0**exponent


def test_the_error_function_is_the_schemes_own_arithmetic() -> None:
    values = gauss()[:200].double()
    error = squared_error(values, torch.ones_like(values), ACTIVATION_U8)
    ends = torch.tensor([0.5, 2.0], dtype=torch.float64)
    for index, end in enumerate(ends.tolist()):
        qparams = choose_qparams(torch.tensor(-end), torch.tensor(end), ACTIVATION_U8)
        back = qparams.dequantize(qparams.quantize(values.float()))
        assert float(error(-ends, ends)[index]) == pytest.approx(float((back - values).square().sum()))


def test_of_equal_errors_the_widest_range_is_taken() -> None:
    assert best_range(lambda low, high: torch.zeros_like(low), -3.0, 5.0, False) == (-3.0, 5.0)


@pytest.mark.parametrize(("low", "symmetric"), [(0.0, False), (-8.0, True)])
def test_a_single_end_is_found_to_a_hundredth(low: float, symmetric: bool) -> None:
    _, high = best_range(lambda low, high: (high - 4.2).square(), low, 8.0, symmetric)
    assert high == pytest.approx(4.2, rel=0.01)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_all_values_may_be_clipped_where_that_is_best(sign: float) -> None:
    """At the full range 1.0 lies between two levels, 0.16 apart; a range that ends just below it is far better."""
    x = sign * torch.tensor([1.0] * 99 + [1.1])
    observer = HistogramObserver(weight_scheme(4, None))
    observer(x)
    low, high = observer.range()
    assert float(low) == float(high)
    assert abs(float(high)) < 1.0
    assert rms(x, low, high, observer.scheme) < 0.5 * rms(x, x.min(), x.max(), observer.scheme)


def test_two_ends_are_found_apart() -> None:
    def error(low: Tensor, high: Tensor) -> Tensor:
        return (low + 0.5).square() + (high - 4.0).square()

    low, high = best_range(error, -8.0, 8.0, False)
    assert low == pytest.approx(-0.5, rel=0.02)
    assert high == pytest.approx(4.0, rel=0.02)


def test_two_bits_clip_far_and_eight_hardly() -> None:
    x = gauss()
    ends = []
    for bits in (2, 4, 8):
        observer = HistogramObserver(weight_scheme(bits, None))
        observer(x)
        ends.append(float(observer.range()[1]))
    # A unit Gaussian in 3 and 15 uniform levels is best served by steps of 1.224 and 0.3534 (Max 1960, table II).
    assert ends[0] == pytest.approx(1.224, rel=0.05)
    assert ends[1] == pytest.approx(7 * 0.3534, rel=0.05)
    assert ends[2] > 3.5


def test_zeros_of_a_relu_cost_nothing() -> None:
    x = torch.cat((torch.zeros(100_000), gauss().abs()[:1000]))
    few, many = HistogramObserver(FOUR_BITS), HistogramObserver(FOUR_BITS)
    few(x[100_000:])
    many(x)
    assert float(few.range()[1]) == float(many.range()[1])


def test_channels_are_searched_apart() -> None:
    x = torch.stack((gauss(), 1000 * gauss().abs()))
    observer = HistogramObserver(replace(FOUR_BITS, axis=0))
    observer(x)
    qparams = observer.qparams()
    assert qparams.scale.shape == (2,)
    assert float(qparams.scale[1] / qparams.scale[0]) > 300
