"""Rows of ranges, and the suspicions: each raised by data that deserves it, none by healthy layers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from quant.calibrate import ranges
from quant.calibrate.report import table, unseen, warnings_of
from quant.kernels import ACTIVATION_U8, weight_scheme
from quant.observers import (
    FixedObserver,
    HistogramObserver,
    MinMaxObserver,
    Observer,
    PercentileObserver,
)
from torch import Tensor, nn

CHANNELS = replace(ACTIVATION_U8, axis=1)


def fed(observer: Observer, *batches: Tensor, name: str = "") -> Observer:
    observer.name = name
    for batch in batches:
        observer(batch)
    return observer


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def suspicions(observer: Observer) -> str:
    [row] = ranges(nn.Sequential(observer))
    return "\n".join(row.warnings)


HEALTHY: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: normal(10_000),
    "after a ReLU that lets little through": lambda: (normal(100_000) - 2).relu(),
    "after GELU": lambda: nn.functional.gelu(normal(100_000) * 4),
    "after a sigmoid": lambda: normal(10_000).sigmoid(),
    "uniform": lambda: torch.linspace(-3, 5, 1000),
    "all negative": lambda: -normal(10_000).abs(),
    "two values": lambda: torch.tensor([0.0, 1.0]).repeat(100),
    "exponential tail": lambda: -torch.rand(100_000, generator=torch.Generator().manual_seed(0)).clamp(1e-6).log(),
}


@pytest.mark.parametrize("observer", [HistogramObserver, MinMaxObserver, PercentileObserver])
@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY.keys())
def test_healthy_layers_are_not_suspected(make: Callable[[], Tensor], observer: type[Observer]) -> None:
    assert suspicions(fed(observer(), make())) == ""
    assert suspicions(fed(observer(CHANNELS), make()[:1000, None] * torch.tensor([1.0, 50.0]))) == ""


def outlier() -> Tensor:
    return torch.cat((normal(10_000), torch.tensor([500.0])))


def eight_decades() -> Tensor:
    """Mel power: no zeros, and nothing in common between its ends."""
    return 10 ** (torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 8 - 8)


SUSPICIOUS: dict[str, tuple[Callable[[], Observer], str]] = {
    "nothing seen": (lambda: MinMaxObserver(), "saw no finite value and has no range"),
    "only NaN": (lambda: fed(MinMaxObserver(), torch.tensor([math.nan])), "1 NaN and 0 infinite .*\nsaw no finite"),
    "some infinite": (lambda: fed(HistogramObserver(), torch.tensor([1.0, -1.0, math.inf])), "0 NaN and 1 infinite"),
    "a fixed range, not finite": (
        lambda: fed(FixedObserver.sigmoid(), torch.tensor([math.nan])),
        "1 NaN and 0 infinite",
    ),
    "constant": (lambda: fed(MinMaxObserver(), torch.full((5,), 2.5)), "is always 2.5, constant: a dead layer"),
    "all zero": (lambda: fed(HistogramObserver(), torch.zeros(5)), "is always 0, constant"),
    "a constant channel": (
        lambda: fed(MinMaxObserver(CHANNELS), normal(50, 3) * torch.tensor([1.0, 0.0, 1.0])),
        "channels 1 are constant",
    ),
    "many constant channels": (
        lambda: fed(MinMaxObserver(CHANNELS), torch.ones(5, 9)),
        r"channels 0, 1, 2, 3, 4 and 4",
    ),
    "an outlier": (lambda: fed(HistogramObserver(), outlier()), "500, is over [0-9]+ times the 99.9th percentile"),
    "an outlier in a channel": (
        lambda: fed(HistogramObserver(CHANNELS), torch.stack((normal(10_001), outlier()), dim=1)),
        "^channel 1: the largest magnitude, 500, .*",
    ),
    "far from zero": (lambda: fed(MinMaxObserver(), 100 + normal(1000)), r"values lie in \[96.*, 104.*\], far from"),
    "far below zero": (lambda: fed(HistogramObserver(), -100 + normal(1000)), "far from zero"),
    "far from zero, symmetric": (lambda: fed(MinMaxObserver(weight_scheme(8, None)), 100 + normal(1000)), "far from"),
    "clipped above": (
        lambda: fed(PercentileObserver(percentile=95.0), normal(10_000).abs()),
        r"^2\.\d% of the values lie above the range",
    ),
    "clipped on both sides": (
        lambda: fed(PercentileObserver(percentile=90.0), normal(10_000)),
        r"% of the values lie below the range .*\n.*% of the values lie above",
    ),
    "eight decades": (lambda: fed(HistogramObserver(), eight_decades()), r"\d\d% of the values round to zero"),
    "eight negative decades": (
        lambda: fed(HistogramObserver(), -eight_decades()),
        r"\d\d% of the values round to zero",
    ),
    "nearly everything tiny": (
        lambda: fed(MSELike(), torch.cat((normal(100_000) * 1e-4, torch.tensor([-1.0, 1.0]).repeat(1000)))),
        "98% of the values round to zero",
    ),
    "unequal channels": (
        lambda: fed(MinMaxObserver(CHANNELS), normal(100, 2) * torch.tensor([1.0, 1000.0])),
        "the widest of 2 channels has .* times the range of the narrowest",
    ),
}


class MSELike(PercentileObserver):
    """A range that keeps everything, from a histogram."""

    def __init__(self) -> None:
        super().__init__(percentile=100.0)


@pytest.mark.parametrize(("make", "expected"), SUSPICIOUS.values(), ids=SUSPICIOUS.keys())
def test_suspicious_layers_say_why(make: Callable[[], Observer], expected: str) -> None:
    found = suspicions(make())
    assert re.search(expected, found), found
    assert len(found.splitlines()) == len(re.findall(r"\n|\\n", expected)) + 1, found


def test_many_suspicious_channels_are_counted() -> None:
    data = outlier()[:, None] * torch.ones(50)
    first, *_, last = suspicions(fed(HistogramObserver(CHANNELS), data)).splitlines()
    assert first.startswith("channel 0: ")
    assert last == "the same or similar of 47 more channels"


def model() -> nn.Module:
    return nn.Sequential(
        fed(MinMaxObserver(), torch.tensor([-1.0, 3.0]), name="encoder.0"),
        nn.Linear(2, 2),
        MinMaxObserver(),
        FixedObserver(low=-1.0, high=1.0),
        fed(MinMaxObserver(weight_scheme(8)), torch.tensor([[1.0, -2.0], [4.0, 0.5]])),
    )


def test_a_row_has_what_was_seen_and_what_the_integers_reach() -> None:
    rows = ranges(model())
    assert [(row.layer, row.observer, row.channels) for row in rows] == [
        ("encoder.0", "MinMaxObserver", 1),
        ("2", "MinMaxObserver", 1),
        ("3", "FixedObserver", 1),
        ("4", "MinMaxObserver", 2),
    ]
    first, second, third, fourth = rows
    assert (first.low, first.high) == (-1.0, 3.0)
    assert (first.chosen_low, first.chosen_high) == pytest.approx((-1.0, 3.0), abs=4 / 255)
    assert first.chosen_high - first.chosen_low == pytest.approx(4.0)
    assert math.isnan(second.low)
    assert math.isnan(second.chosen_high)
    assert math.isnan(third.low)
    assert (third.chosen_low, third.chosen_high) == pytest.approx((-1.0, 1.0), abs=2 / 255)
    assert third.warnings == ()
    assert (fourth.low, fourth.high) == (-2.0, 4.0)
    assert (fourth.chosen_low, fourth.chosen_high) == pytest.approx((-4.0, 4.0))


def test_the_model_is_only_read() -> None:
    net = nn.Sequential(fed(HistogramObserver(), normal(1000)), fed(HistogramObserver(CHANNELS), normal(100, 3)))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert ranges(net) == ranges(net)
    assert [name for name, value in net.state_dict().items() if not torch.equal(value, before[name])] == []


def test_the_table_and_the_warnings() -> None:
    rows = ranges(model())
    lines = table(rows).splitlines()
    assert lines[0].split() == ["layer", "observer", "channels", "seen", "range"]
    assert lines[1].split() == ["encoder.0", "MinMax", "1", "[-1,", "3]", "[-1.004,", "2.996]"]
    assert lines[2].split() == ["2", "MinMax", "1", "none", "none", "!"]
    assert warnings_of(rows) == [f"2: {rows[1].warnings[0]}"]
    assert "(root)" in table(ranges(fed(MinMaxObserver(), torch.ones(2))))
    assert table([]).split() == ["layer", "observer", "channels", "seen", "range"]


def test_rows_are_json() -> None:
    data = [row.to_dict() for row in ranges(model())]
    assert json.loads(json.dumps(data, allow_nan=False))[1]["low"] is None


def test_unseen_names_layers_and_channels() -> None:
    half = fed(MinMaxObserver(CHANNELS), torch.tensor([[1.0, math.nan]]))
    observers = {"a": MinMaxObserver(), "b": half, "c": FixedObserver.sigmoid(), "d": FixedObserver.sigmoid(CHANNELS)}
    observers["a"].name = "layer.a"
    assert unseen(observers) == ["layer.a", "b (channels [1])", "d"]
