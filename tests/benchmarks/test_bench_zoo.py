"""What a row of `bench_zoo.py` says, and what its goals are held against; its times are not looked at."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OWN = ("bench_zoo", "zoo")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark's module, imported the way its script is: from its own folder.

    It reads the package `zoo` of tests/, and the tutorials have another of this name: neither may be left to the other.
    """
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), str(BENCHMARKS.parent / "tests"), *sys.path])
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in OWN}
    yield importlib.import_module("bench_zoo")
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]
    sys.modules.update(others)


class Between(nn.Module):
    """Two layers with a function between that no program computes natively, and a write into the inputs."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.writes = nn.Linear(16, 16), nn.Linear(16, 4), writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            x.mul_(0.5)
        return self.two(torch.erfinv(torch.tanh(self.one(x)) * 0.9))


def entry_of(bench: ModuleType, name: str = "own_between", **options: Any) -> Any:
    return bench.Entry(name, lambda: Between(**options), lambda size: torch.randn(size, 16))


def row_of(name: str, ratio: float, **more: Any) -> dict[str, Any]:
    ratios = {"float": [ratio, ratio, ratio], **more.pop("others", {})}
    made_of = {"native": [3, 4], "single": {"sort": 2}, "islands": [], "float": [], "db": 30.0, "batch": 4}
    return {"name": name, "mode": "eager", "times": {"float": 1e-3, "octet": 1e-3}, "ratios": ratios, "verdict": "ok",
            **made_of, **more}  # fmt: skip


@pytest.mark.parametrize(
    ("median", "low", "high", "said"),
    [(2.0, 1.9, 2.1, "ok"), (0.9, 0.8, 1.0, "ok"), (0.98, 0.975, 0.985, "ok"), (0.9, 0.85, 0.96, "SLOWER")],
    ids=["faster", "unsure", "noise", "slower"],
)
def test_a_row_is_slower_where_the_whole_interval_is(
    median: float, low: float, high: float, said: str, bench: ModuleType
) -> None:
    assert bench.verdict(bench.harness.Estimate(median, low, high)) == said


def test_a_row_says_what_a_call_is_made_of(bench: ModuleType) -> None:
    row = bench.measure(entry_of(bench), "eager", effort=bench.harness.Effort(seconds=0.0, rounds=2, patience=1.0))
    assert row["verdict"] in ("ok", "SLOWER"), row
    assert row["batch"] == 4
    assert row["db"] > 20
    assert row["single"]["erfinv"] == 1
    assert set(row["times"]) == {"float", "octet"}
    low, high = row["ratios"]["float"][1:]
    assert 0 < low <= high
    json.dumps(row)


def test_an_error_is_a_verdict(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "caller", lambda *_: 1 // 0)
    row = bench.measure(entry_of(bench), "eager")
    assert row["verdict"].startswith("fails: ZeroDivisionError")


@pytest.mark.parametrize("writes", [False, True])
def test_a_model_that_writes_into_its_inputs_gets_copies(writes: bool, bench: ModuleType) -> None:
    entry = entry_of(bench, writes=writes)
    with torch.inference_mode():
        model, batch = entry.build(), torch.ones(2, 16)
        call = bench.caller(entry, model, batch)
        outputs = [call() for _ in range(3)]
    assert torch.equal(batch, torch.ones(2, 16))
    assert torch.equal(outputs[0], outputs[2])


def test_the_slowest_row_comes_first_and_is_described(bench: ModuleType) -> None:
    lines = bench.table([row_of("fast", 3.0), row_of("slow", 0.5), {"name": "bad", "verdict": "fails: why"}]).split(
        "\n"
    )
    assert [line.split()[0] for line in lines[2:4]] == ["slow", "fast"]
    assert lines[4:] == ["bad: fails: why", "slow: native calls of 3 + 4 steps; single: 2 sort"]


def test_goals_are_of_rows_and_of_medians(bench: ModuleType) -> None:
    fast = [row_of(f"fast {place}", 3.0, others={"compiled": [1.2, 1.2, 1.2]}) for place in range(3)]
    slow = row_of("slow", 0.5, verdict="SLOWER")
    assert bench.missed([row_of("fast", 3.0)]) == []
    assert bench.missed([*fast, slow]) == ["slow: SLOWER", "median against compiled: 1.20 of 1.5"]
    assert bench.missed([row_of("even", 1.1)]) == ["median against float: 1.10 of 2.5"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a row's process is forked, which this system cannot")
def test_rows_are_kept(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row that is there is not measured again; one whose process dies is a row."""
    results = tmp_path / "rows.jsonl"
    results.write_text(json.dumps(row_of("own_kept", 3.0)) + "\n")
    made = {"own_kept": entry_of(bench, "own_kept"), "own_dies": bench.Entry("own_dies", lambda: os._exit(3), None)}
    monkeypatch.setattr(bench, "CATALOGUE", made)
    monkeypatch.setattr(importlib.import_module("zoo.rows"), "CATALOGUE", made)
    assert bench.main(["--results", str(results)]) == 1
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["name"], row["verdict"]) for row in rows] == [
        ("own_kept", "ok"),
        ("own_dies", "fails: the process ended with 3"),
    ]
    assert "own_dies: fails: the process ended with 3" in results.with_suffix(".txt").read_text()
    with pytest.raises(SystemExit, match="no architecture's name matches"):
        bench.main(["--only", "nothing", "--results", str(results)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a row's process is forked, which this system cannot")
def test_a_run_comes_in_slices(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the minutes leave is done by the next call; rows of another commit are said, or done again."""
    results = tmp_path / "rows.jsonl"
    made = {name: entry_of(bench, name) for name in ("own_first", "own_second")}
    monkeypatch.setattr(bench, "CATALOGUE", made)
    monkeypatch.setattr(importlib.import_module("zoo.rows"), "CATALOGUE", made)
    monkeypatch.setattr(bench, "measure", lambda entry, *_: row_of(entry.name, 3.0))
    monkeypatch.setattr(bench.harness, "_commit", lambda: "later")
    results.write_text(json.dumps(row_of("own_first", 3.0, commit="earlier")) + "\n")
    assert bench.main(["--results", str(results), "--minutes", "0"]) == 1
    assert "1 rows are left" in capsys.readouterr().out
    assert bench.main(["--results", str(results), "--minutes", "5"]) == 0
    assert "rows of several commits: 1 at earlier, 1 at later" in capsys.readouterr().out
    assert bench.main(["--results", str(results), "--this-commit"]) == 0
    assert "several commits" not in capsys.readouterr().out
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["name"], row["commit"]) for row in rows] == [
        ("own_first", "earlier"),
        ("own_second", "later"),
        ("own_first", "later"),
    ]
