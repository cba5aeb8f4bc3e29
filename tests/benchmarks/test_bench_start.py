"""What `bench_start.py` measures, and what its verdicts say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import quant


class Scripted:
    """A side whose rows take the seconds that it is told, a lap each, and the last ones from then on."""

    def __init__(self, name: str, seconds: list[float], asked: list[str]) -> None:
        self.name, self.seconds, self.asked = name, seconds, asked

    def lap(self, case: str) -> dict[str, float]:
        self.asked.append(self.name)
        return {"load": self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]}

    def fresh(self, what: str, case: str) -> dict[str, float]:
        return {f"import, {what}, call": 1.0}


@pytest.mark.parametrize(
    ("row", "here", "goals", "text"),
    [
        ("load", [1.0] * 5, {}, "reached"),
        ("load", [1.02] * 5, {}, "reached"),
        ("load", [1.1] * 5, {}, "NOT reached: 1.10 of 1"),
        ("load", [0.5, 0.6, 1.1, 1.2, 1.3], {}, "unsure"),
        ("new shape", [0.9] * 5, {"new shape": 0.5}, "NOT reached: 0.90 of 0.5"),
        ("prepare", [2.5] * 5, {"prepare": 3.0}, "reached"),
        ("convert", [2.5] * 5, {}, ""),
    ],
)
def test_verdicts(
    row: str, here: list[float], goals: dict[str, float], text: str, load: Callable[[str], ModuleType]
) -> None:
    bench, harness = load("bench_start"), load("harness")
    race = harness.Race("c", {"row": row}, {bench.HERE: here, bench.THERE: [1.0] * 5})
    assert bench.verdict(race, goals) == text
    assert text in bench.table({row: race}, goals)


def test_one_checkout_alone_is_shown_and_not_judged(load: Callable[[str], ModuleType]) -> None:
    bench, harness = load("bench_start"), load("harness")
    race = harness.Race("c", {"row": "load"}, {bench.HERE: [1e-3, 2e-3, 3e-3]})
    assert bench.verdict(race, {}) == ""
    assert "2 ms [1.5 ms, 2.5 ms]" in bench.table({"load": race}, {})


def test_sides_take_turns_and_a_case_that_is_not_clear_gets_more_laps(load: Callable[[str], ModuleType]) -> None:
    bench, asked = load("bench_start"), list[str]()
    sides = [Scripted(bench.HERE, [1.0], asked), Scripted(bench.THERE, [1.0], asked)]
    races = bench.measure(sides, "c", 4, 2, {})
    assert asked == ["here", "there", "here", "there", "there", "here", "here", "there", "there", "here"]
    assert {row: len(race.seconds["here"]) for row, race in races.items()} == {
        "load": 4,
        "import, load, call": 2,
        "import, quantize, call": 2,
    }
    here = [1.0, 1.2, 0.9, 1.3, 0.9, 1.3, 0.9, 1.0]  # the first lap is not counted
    sides = [Scripted(bench.HERE, here, []), Scripted(bench.THERE, [1.0], [])]
    races = bench.measure(sides, "c", 4, 0, {})
    assert 4 < len(races["load"].seconds["here"]) <= 4 * bench.PATIENCE
    assert bench.verdict(races["load"], {}) == "reached"


def test_goals_are_of_rows_that_there_are(
    load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load("bench_start")
    options = bench.parse(["--goal", "new shape=0.5", "prepare=3"])
    assert dict(options.goal) == {"new shape": 0.5, "prepare": 3.0}
    with pytest.raises(SystemExit):
        bench.parse(["--goal", "new shapes=0.5"])
    assert "there is no row 'new shapes'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.parse(["--against", "/"])
    assert "/ is no checkout of this package: it has no quant/" in capsys.readouterr().err


def test_a_lap_measures_every_row_of_a_living_process(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench, child = load("bench_start"), load("start_child")
    monkeypatch.setattr(child, "STEADY", 2)
    monkeypatch.setattr(child, "NEW_SIZES", (3,))
    for case in ("small CNN", "encoder, 3 layers", "LSTM"):
        seconds = child.lap(quant, case, tmp_path)
        assert set(seconds) == {row for row in bench.ROWS if not row.startswith("import")}
        assert all(one > 0 for one in seconds.values())
        assert child.path_of(case, tmp_path).exists()


def test_a_checkout_is_measured_in_processes_of_its_own(load: Callable[[str], ModuleType]) -> None:
    bench = load("bench_start")
    with bench.opened({bench.HERE: bench.ROOT, bench.THERE: None}, bench.CHILD) as [side]:
        assert side.lap("LSTM")["load"] > 0
        assert set(side.fresh("load", "LSTM")) == {"import quant", "import, load, call"}


def test_a_checkout_without_a_package_says_so(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    bench = load("bench_start")
    for name in load("sides").FOLDERS.values():
        (tmp_path / "old" / name).mkdir(parents=True)
    with (
        bench.opened({bench.HERE: tmp_path / "old"}, bench.CHILD) as [side],
        pytest.raises(RuntimeError, match=r"start_child.py quantize LSTM .*: it ended with 1, and gave no figures"),
    ):
        side.fresh("quantize", "LSTM")
