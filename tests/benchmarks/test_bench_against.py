"""What `bench_against.py` measures, and what its verdicts say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest


class Scripted:
    """A side whose laps take the seconds that it is told, and the last ones from then on."""

    def __init__(self, name: str, seconds: list[float], asked: list[str], error: float = 0.01) -> None:
        self.name, self.seconds, self.asked, self.error = name, seconds, asked, error

    def lap(self, case: str) -> dict[str, float]:
        self.asked.append(self.name)
        return {"seconds": self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0], "error": self.error}


@pytest.mark.parametrize(
    ("here", "error", "text"),
    [
        ([1.0] * 5, 0.01, "reached"),
        ([1.02] * 5, 0.01, "reached"),
        ([1.1] * 5, 0.01, "NOT reached: 1.10 of 1"),
        ([0.5, 0.6, 1.1, 1.2, 1.3], 0.01, "unsure"),
        ([0.5] * 5, 0.02, "NOT reached: error 0.0200 above 0.0100"),
    ],
)
def test_verdicts(here: list[float], error: float, text: str, load: Callable[[str], ModuleType]) -> None:
    bench, harness = load("bench_against"), load("harness")
    race = harness.Race("c", {}, {bench.HERE: here, bench.THERE: [1.0] * 5})
    errors = {bench.HERE: error, bench.THERE: 0.01}
    assert bench.verdict(race, errors) == text
    assert bench.cells(race, errors)[-1] == text


def test_sides_take_turns_after_a_lap_that_warms_up(load: Callable[[str], ModuleType]) -> None:
    bench, asked = load("bench_against"), list[str]()
    sides = [Scripted(bench.HERE, [9.0, 1.0], asked), Scripted(bench.THERE, [9.0, 2.0, 4.0, 5.0], asked, 0.03)]
    seconds, errors = bench.measure(sides, "c", 3)
    assert asked == ["here", "there", "here", "there", "there", "here", "here", "there"]
    assert seconds == {"here": 1.0, "there": 4.0}
    assert errors == {"here": 0.01, "there": 0.03}


def test_each_process_gives_one_figure(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    bench, started = load("bench_against"), list[int]()

    @contextmanager
    def opened(*_: object) -> Iterator[list[Scripted]]:
        started.append(len(started))
        yield [Scripted(bench.HERE, [1.0 + len(started)], []), Scripted(bench.THERE, [1.0], [])]

    monkeypatch.setattr(bench, "opened", opened)
    options = bench.parse([str(bench.ROOT), "--processes", "3"])
    race, errors = bench.measure_all(options, ["a", "b"], 1)["b"]
    assert race.seconds == {"here": [2.0, 3.0, 4.0], "there": [1.0] * 3}
    assert errors == {"here": 0.01, "there": 0.01}
    assert len(started) == 3


def test_a_checkout_is_measured_in_a_process_of_its_own(load: Callable[[str], ModuleType]) -> None:
    bench = load("bench_against")
    with bench.opened({bench.HERE: bench.ROOT}, bench.CHILD) as [side]:
        first, second = side.lap("Linear 1x64x64"), side.lap("call: one Linear")
    assert 0 < first["seconds"] < 1
    assert 0 < first["error"] < 0.02
    assert second["error"] != first["error"]


def test_a_package_from_elsewhere_is_refused(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"quant was imported from .*, not from the checkout that is linked in"):
        load("row_child").serve(tmp_path)


def test_unknown_cases_and_checkouts_are_named(
    load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load("bench_against")
    with pytest.raises(SystemExit, match="--only Perceptron: no case is called so; there are LSTM H512 B1, "):
        bench.main([str(bench.ROOT), "--only", "Perceptron"])
    with pytest.raises(SystemExit):
        bench.parse(["/"])
    assert "/ is no checkout of this package: it has no quant/" in capsys.readouterr().err
