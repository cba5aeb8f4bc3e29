"""FixedObserver: the range that was given, whatever is seen."""

from __future__ import annotations

import math

import pytest
import torch
from quant.kernels import QScheme
from quant.observers import FixedObserver, NoDataSeen


@pytest.mark.parametrize(
    ("observer", "expected"),
    [
        (FixedObserver.sigmoid(), (0.0, 1.0)),
        (FixedObserver.softmax(), (0.0, 1.0)),
        (FixedObserver.tanh(), (-1.0, 1.0)),
        (FixedObserver(low=-2.0, high=0.5), (-2.0, 0.5)),
    ],
    ids=["sigmoid", "softmax", "tanh", "own"],
)
def test_the_range_is_known_before_and_after_data(observer: FixedObserver, expected: tuple[float, float]) -> None:
    assert tuple(float(end) for end in observer.range()) == expected
    observer(torch.tensor([-50.0, 50.0]))
    assert tuple(float(end) for end in observer.range()) == expected
    assert (float(observer.low), float(observer.high)) == (-50.0, 50.0)


def test_the_scales_of_tensorflow_lite_can_be_had_exactly() -> None:
    assert float(FixedObserver(low=0.0, high=255 / 256).qparams().scale) == 1 / 256
    tanh = FixedObserver(low=-1.0, high=127 / 128).qparams()
    assert (float(tanh.scale), int(tanh.zero_point)) == (1 / 128, 128)


def test_one_is_exact_in_the_range_of_a_sigmoid() -> None:
    qparams = FixedObserver.sigmoid().qparams()
    assert float(qparams.dequantize(qparams.quantize(torch.ones(1)))) == 1.0


def test_channels_are_known_only_after_data() -> None:
    observer = FixedObserver(QScheme(torch.uint8, 0, 255, symmetric=False, axis=1), low=0.0, high=1.0)
    with pytest.raises(NoDataSeen):
        observer.range()
    observer(torch.zeros(2, 3))
    assert observer.range()[1].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (math.nan, 1.0), (0.0, math.inf)])
def test_a_range_that_is_none_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="finite ends"):
        FixedObserver(low=low, high=high)
