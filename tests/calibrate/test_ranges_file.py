"""Ranges by hand: a file that nobody edited changes no bit, an edited one decides, a wrong one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quant.calibrate import load_ranges, ranges, save_ranges, set_ranges
from quant.kernels import weight_scheme
from quant.observers import ChannelMean, FakeQuantize, HistogramObserver, MinMaxObserver, Observer, make_observer
from torch import Tensor, nn

from quant import calibrate


class Net(nn.Module):
    """Some observers with layers' names, and two that choose no range of their own."""

    def __init__(self) -> None:
        super().__init__()
        names = ("minmax", "histogram", "percentile", "entropy", "moving_average")
        self.points = nn.ModuleDict({name: make_observer(name) for name in names})
        self.points["fixed"] = make_observer("fixed", low=-1.0, high=127 / 128)
        self.columns, self.mean = MinMaxObserver(weight_scheme(8, axis=1)), ChannelMean(-1)
        for name, point in self.points.items():
            assert isinstance(point, Observer)
            point.name = f"block.{name}"

    def forward(self, x: Tensor) -> Tensor:
        for index, point in enumerate(self.points.values()):
            x = point(x * 1.7 - 0.1 * index)
        out: Tensor = self.mean(self.columns(x))
        return out


def fed(scale: float = 1.0) -> Net:
    net = Net()
    net(scale * torch.randn(64, 3, generator=torch.Generator().manual_seed(0)))
    return net


def observers(net: Net) -> dict[str, Observer]:
    return {point.name: point for point in net.points.values() if isinstance(point, Observer)}


def edited(path: Path, change: Any) -> Path:
    data = json.loads(path.read_text())
    change(data["ranges"])
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_ranges(fed(), tmp_path / "ranges.json")
    return tmp_path / "ranges.json"


@pytest.mark.parametrize("seen", [False, True], ids=["no data", "other data"])
def test_a_round_trip_is_exact(file: Path, seen: bool) -> None:
    first, second = fed(), fed(7.0) if seen else Net()
    load_ranges(second, file)
    for mine, theirs in zip(observers(first).values(), observers(second).values(), strict=True):
        assert mine.qparams() == theirs.qparams()
        assert [float(end) for end in mine.range()] == [float(end) for end in theirs.range()]
    again = file.with_name("again.json")
    save_ranges(second, again)
    ends = [
        {name: (e["low"], e["high"]) for name, e in json.loads(p.read_text())["ranges"].items()} for p in (file, again)
    ]
    assert ends[0] == ends[1]


@given(low=st.floats(-(2.0**100), 0.0, width=32), high=st.floats(0.0, 2.0**100, width=32))
def test_every_float32_survives(low: float, high: float) -> None:
    before, after = MinMaxObserver(), MinMaxObserver()
    before(torch.tensor([low, high]))
    entry = json.loads(json.dumps(calibrate.ranges_file._entry(before)))
    after.give(entry["low"], entry["high"])
    assert before.qparams() == after.qparams()


def test_a_line_is_a_range_and_says_where_it_comes_from(file: Path) -> None:
    net = fed()
    data = json.loads(file.read_text())["ranges"]
    assert list(data) == list(observers(net))
    for name, observer in observers(net).items():
        info, qparams = data[name]["info"], observer.qparams()
        assert info["observer"] == name.removeprefix("block.")
        assert torch.tensor(info["scale"], dtype=torch.float32) == qparams.scale
        assert info["zero_point"] == int(qparams.zero_point)
        assert torch.equal(torch.tensor(info["seen"]), torch.cat((observer.low, observer.high)))
    lines = [line for line in file.read_text().splitlines() if '"block.' in line]
    assert len(lines) == len(data)


def test_an_edited_range_decides_whatever_is_seen(file: Path) -> None:
    net = Net()
    load_ranges(net, edited(file, lambda data: data["block.histogram"].update(low=-0.5, high=2.0)))
    net(torch.full((8, 3), 40.0))
    low, high = observers(net)["block.histogram"].range()
    assert (float(low), float(high)) == (-0.5, 2.0)
    assert float(observers(net)["block.histogram"].qparams().scale) == pytest.approx(2.5 / 255)
    save_ranges(net, file)
    assert json.loads(file.read_text())["ranges"]["block.histogram"]["info"]["observer"] == "given"


def test_info_is_not_read(file: Path) -> None:
    net = Net()
    load_ranges(net, edited(file, lambda data: [entry.pop("info") for entry in data.values()]))
    assert observers(net)["block.minmax"].qparams() == observers(fed())["block.minmax"].qparams()


def test_what_a_given_range_clips_is_said() -> None:
    net = fed()
    set_ranges(net, {"block.histogram": (-0.5, 0.5), "block.minmax": (-0.5, 0.5)})
    rows = {row.layer: row for row in ranges(net)}
    assert rows["block.histogram"].observer == rows["block.minmax"].observer == "Given"
    assert any("and are clipped: widen it" in text for text in rows["block.histogram"].warnings)
    assert any("the range set by hand ends at -0.49" in text for text in rows["block.minmax"].warnings)
    set_ranges(net, {"block.minmax": (-50.0, 50.0)})
    assert not any("given" in text for text in {row.layer: row for row in ranges(net)}["block.minmax"].warnings)


def test_a_given_range_needs_no_data() -> None:
    net = Net()
    set_ranges(net, dict.fromkeys(observers(net), (0.0, 1.0)))
    rows = [row for row in ranges(net) if row.layer.startswith("block")]
    assert all(row.warnings == () and row.chosen_high == pytest.approx(1.0) for row in rows)


def test_a_setting_is_no_statistic() -> None:
    """Statistics go on under it: taken away, the range is what it would have been."""
    net, other = fed(), fed()
    set_ranges(net, {"block.histogram": (0.0, 1.0)})
    assert net.state_dict().keys() == other.state_dict().keys()
    point = observers(net)["block.histogram"]
    point.given = None
    assert point.qparams() == observers(other)["block.histogram"].qparams()


def test_unknown_names_come_with_those_like_them(file: Path) -> None:
    net = Net()
    with pytest.raises(
        ValueError, match=r"set_ranges: the model has no range of 'blok\.minmax' \(it has 'block\.minmax'"
    ):
        set_ranges(net, {"blok.minmax": (0.0, 1.0)})
    path = edited(file, lambda data: data.update({"head": data["block.minmax"]}))
    with pytest.raises(
        ValueError, match=r"ranges\.json: the model has no range of 'head' \(it has 'block\.minmax', .* and 1 more\)$"
    ):
        load_ranges(net, path)


def test_missing_names_are_listed(file: Path) -> None:
    def rename(data: dict[str, Any]) -> None:
        data["block.minimax"] = data.pop("block.minmax")

    with pytest.raises(
        ValueError, match=r"json lacks the ranges of 'block\.minmax' \(the file has 'block\.minimax'.*set_r"
    ):
        load_ranges(Net(), edited(file, rename))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"line 1: not JSON: "),
        ("[1]", "expected what calibrate.save_ranges writes"),
        ('{"format": "octet ranges 9", "ranges": {}}', "expected what calibrate.save_ranges writes"),
        ('{"format": "octet ranges 1", "ranges": {"a": {}, "a": {}}}', "'a' stands there twice"),
        ('{"format": "octet ranges 1", "ranges": {"a": {"low": 0}}}', r"'a' is \{\"low\": 0\}, expected"),
        ('{"format": "octet ranges 1", "ranges": {"a": {"low": 0, "hihg": 1, "high": 1}}}', "expected"),
        ('{"format": "octet ranges 1", "ranges": {"a": {"low": "0", "high": 1}}}', "expected two numbers"),
        ('{"format": "octet ranges 1", "ranges": {"a": {"low": true, "high": 1}}}', "expected two numbers"),
    ],
    ids=["broken", "list", "version", "twins", "no high", "misspelt", "text", "bool"],
)
def test_a_file_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_ranges(Net(), tmp_path / "r.json")


def test_a_file_of_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="no text file"):
        load_ranges(Net(), tmp_path / "r.json")


@pytest.mark.parametrize("pair", [(2.0, 1.0), (float("nan"), 1.0), (0.0, 1e39), (0.0, float("inf"))], ids=str)
def test_a_pair_that_is_no_range_changes_nothing(pair: tuple[float, float]) -> None:
    net = Net()
    set_ranges(net, {"block.entropy": (0.0, 3.0)})
    with pytest.raises(ValueError, match=r"layer 'block\.minmax': range is .*expected finite ends, low <= high"):
        set_ranges(net, {"block.entropy": (0.0, 1.0), "block.histogram": (0.0, 1.0), "block.minmax": pair})
    assert observers(net)["block.entropy"].given == (0.0, 3.0)
    assert observers(net)["block.histogram"].given is None


def test_what_cannot_have_ranges_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(ValueError, match=r"5 observers saw no data: block\.minmax, "):
        save_ranges(Net(), path)
    assert not path.exists()
    with pytest.raises(ValueError, match=r"Linear has no observers; quant\.prepare"):
        save_ranges(nn.Linear(2, 2), path)
    with pytest.raises(ValueError, match="prepared for training"):
        set_ranges(nn.Sequential(FakeQuantize()), {})
    with pytest.raises(TypeError, match=r"prepared is a str, expected an nn\.Module"):
        set_ranges("model", {})  # type: ignore[arg-type]


def test_observers_without_names_go_by_their_modules() -> None:
    net = nn.Sequential(HistogramObserver(), nn.ModuleDict({"a": MinMaxObserver()}))
    set_ranges(net, {"0": (0.0, 1.0), "1.a": (0.0, 2.0)})
    assert [row.chosen_high for row in ranges(net)] == [pytest.approx(1.0), pytest.approx(2.0)]
