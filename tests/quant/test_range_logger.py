"""Ranges for loggers: what a row says, and what a writer of either kind is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.integrations.range_logger import RangeLogger, range_rows


class Writer:
    """As TensorBoard's."""

    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int]] = {}
        self.histograms: dict[str, dict[str, Any]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name] = value, step

    def add_histogram_raw(self, name: str, **values: Any) -> None:
        self.histograms[name] = values


class Run:
    """As wandb's."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(500, 6)


def test_a_row_is_what_calibration_says() -> None:
    model, x = made()
    recipe = quant.Recipe(
        default=quant.QConfig(activation_observer="percentile", activation_options={"percentile": 99.0})
    )
    prepared = quant.prepare(model, x, recipe)
    assert list(range_rows(prepared)) == []
    quant.calibrate.run(prepared, [x], progress=False)
    rows = {row.layer: row for row in range_rows(prepared)}
    for told in quant.calibrate.ranges(prepared):
        row = rows[told.layer]
        assert (row.low, row.high) == (told.chosen_low, told.chosen_high)
    first = rows["input_0"]
    assert first.low == pytest.approx(-first.scale * first.zero_point)
    share = ((x < first.low) | (x > first.high)).double().mean().item()
    assert 0.0 < share == pytest.approx(first.clipped, abs=0.002)
    assert first.counts is not None
    assert first.edges is not None
    assert int(first.counts.sum()) == x.numel()
    seen = torch.histogram(x.double().flatten(), first.edges).hist
    assert (seen - first.counts).abs().sum() < 0.02 * x.numel()  # a bin's values stand for its middle


def test_a_range_by_hand_has_no_histogram() -> None:
    model, x = made()
    prepared = quant.prepare(model, x)
    quant.calibrate.set_ranges(prepared, {"input_0": (-2.0, 2.0)})
    [row] = range_rows(prepared)
    assert (row.layer, row.clipped, row.edges, row.counts) == ("input_0", None, None, None)
    assert "input_0/clipped" not in row.scalars()


@pytest.mark.parametrize("training", [False, True])
def test_both_kinds_of_writer_get_the_same(training: bool) -> None:
    model, x = made()
    prepared = quant.prepare_qat(model, x) if training else quant.prepare(model, x)
    prepared.train(training)
    prepared(x)
    writer, run = Writer(), Run()
    RangeLogger(writer)(prepared, 3)
    RangeLogger(run)(prepared, 3)
    assert run.logged == [({name: value for name, (value, _) in writer.scalars.items()}, 3)]
    assert {"ranges/0/low", "ranges/0/high", "ranges/0/scale", "ranges/0/zero_point"} <= set(writer.scalars)
    assert bool(writer.histograms) is not training  # moving averages keep none


def test_another_writer_is_refused() -> None:
    with pytest.raises(TypeError, match="writer is a dict, expected add_scalar"):
        RangeLogger({})


@pytest.mark.filterwarnings("ignore")  # what TensorBoard itself warns of
def test_tensorboard_takes_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model, x = made()
    prepared = quant.prepare(model, x)
    quant.calibrate.run(prepared, [x], progress=False)
    with SummaryWriter(str(tmp_path)) as writer:
        RangeLogger(writer)(prepared, 7)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in read.Scalars("ranges/0/low")] == [(7, pytest.approx(0.0))]
    assert [event.step for event in read.Histograms("ranges/0/histogram")] == [7]
