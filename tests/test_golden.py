"""The comparison of two versions: equal for one and the same, and loud about any difference."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .golden import run as golden_run
from .golden.differences import DIFFERENCES, Difference, headings, judge
from .golden.hashing import digest
from .golden.networks import functions_called
from .golden.run import Distance, Side, distance, report, run
from .golden.suite import SuiteSide, judge_places, report_suite

ROOT = Path(__file__).resolve().parent.parent


SLOW = pytest.mark.skipif(
    bool({os.environ.get("OCTET_FAST_TESTS"), os.environ.get("QUANT_EXTENSION")} & {"1", "none"}),
    reason="OCTET_FAST_TESTS=1 or QUANT_EXTENSION=none: processes that convert networks are slow",
)


@SLOW
def test_a_checkout_equals_itself() -> None:
    command = [sys.executable, str(ROOT / "tests/golden/run.py"), "--against", str(ROOT), "--count", "25"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "all                     25 of    25 equal" in shown.stdout
    assert "Error" not in shown.stdout, "networks that end with an error compare nothing"


def test_a_difference_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["blocks-0", "blocks-1", "dynamic-0"]
    versions = {"octet": "1", "torch": "2"}
    one = Side("a", versions, {"blocks-0": "x", "blocks-1": "y", "dynamic-0": "z"})
    other = Side("b", {**versions, "octet": "0"}, {**one.results, "blocks-1": "error: ValueError"})
    assert report(one, one, names, None) == 0
    assert report(one, other, names, None) == 1
    assert "blocks                   1 of     2 equal" in capsys.readouterr().out
    assert report(one, Side("b", {**versions, "torch": "3"}, one.results), names, None) == 2
    assert "torch: 2 here, 3 there" in capsys.readouterr().err
    assert report(one, Side("b", versions, {}), names, None) == 1, "nothing was compared"


def test_a_package_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    for folder in ("quant", "kernels", "observers", "calibrate"):
        (tmp_path / folder).mkdir()
    (tmp_path / "quant/__init__.py").write_text("raise ImportError('nothing here')")
    with pytest.raises(RuntimeError, match="nothing here"):
        run(tmp_path, ["blocks-0", "blocks-1"], 1)


SUITE = ["--suite", "tests/quant/test_older_files.py"]


@SLOW
def test_the_models_of_a_test_file_equal_themselves(tmp_path: Path) -> None:
    """The second run has no process to start: its results are kept."""
    command = [sys.executable, str(ROOT / "tests/golden/run.py"), "--against", str(ROOT), "--results", "kept.jsonl"]
    for _ in range(2):
        shown = subprocess.run([*command, *SUITE], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert "outputs and weights equal, 0 differ for documented reasons, 0 unexplained" in shown.stdout
        assert "tests that failed here: 0" in shown.stdout
        kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
        assert len(kept) == 2
        assert kept[0] == kept[1]
        assert any(" load #1 weights" in place for place in kept[0]["hashes"])


NAMES = {name: one for one in DIFFERENCES for name in one.names}
DOCUMENTED = next(name for name in NAMES if "::" in name)


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda one: one.decision)
def test_a_documented_difference_has_a_decision(difference: Difference) -> None:
    assert difference.decision in headings(ROOT)
    assert difference.names or difference.calls


@pytest.mark.parametrize("name", NAMES)
def test_what_a_documented_difference_names_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    assert f"def {function}(" in (ROOT / file).read_text() if function else file.rpartition("-")[2].isdigit()


def test_a_difference_is_expected_where_one_side_has_its_decision() -> None:
    decision, place = NAMES[DOCUMENTED].decision, f"{DOCUMENTED}[a] load #0 weights"
    assert list(judge([place], [decision], [], lambda _: False).documented) == [place]
    assert judge([place], [decision], [decision], lambda _: True).unexplained == [place]
    assert judge([f"{place}::other"], [decision], [], lambda _: False).documented
    assert judge([f"{DOCUMENTED}_too #0 weights"], [decision], [], lambda _: False).unexplained


RULE = next(one for one in DIFFERENCES if one.calls)
GROUP_NORM, NEITHER = "operators-29", "operators-0"


def test_the_functions_that_a_network_calls_are_known() -> None:
    assert "group_norm" in RULE.calls & functions_called(GROUP_NORM)
    assert not RULE.calls & functions_called(NEITHER)


@pytest.mark.parametrize(
    ("name", "ratio", "is_documented"),
    [(GROUP_NORM, RULE.ratio + 1, True), (GROUP_NORM, RULE.ratio - 1, False), (NEITHER, RULE.ratio + 1, False)],
    ids=["calls it", "calls it and is far off", "calls it not"],
)
def test_a_difference_of_a_rule_is_one_of_networks_that_call_the_function_and_are_near(
    name: str, ratio: float, is_documented: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(golden_run, "difference", lambda name, checkouts: Distance("as it is", ratio))
    here = Side("a", {"torch": "2"}, {name: "x", "blocks-0": "z"}, [RULE.decision])
    there = Side("b", {"torch": "2"}, {name: "y", "blocks-0": "z"}, [])
    assert report(here, there, [name, "blocks-0"], (ROOT, ROOT)) == (0 if is_documented else 1)
    shown = capsys.readouterr().out
    assert (f"documented: {RULE.reason} ({RULE.decision})\n    {name}" in shown) == is_documented
    there.decisions = [RULE.decision]
    assert report(here, there, [name, "blocks-0"], (ROOT, ROOT)) == 1, "both sides follow it"


def test_a_documented_difference_that_is_not_met_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    decision = NAMES[DOCUMENTED].decision
    missed = judge([], [decision], [], DOCUMENTED.__eq__)
    assert missed.not_met == [DOCUMENTED]
    assert missed.failed
    assert judge([], [decision], [], lambda _: False).not_met == [], "it was not compared"
    missed.show()
    assert f"no difference was met:\n    {DOCUMENTED}" in capsys.readouterr().out


def test_a_difference_of_the_suite_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    file = "tests/quant/test_one.py"
    one = SuiteSide(
        {f"{file}::test_a": "passed", f"{file}::test_b": "failed"}, {f"{file}::test_a #0 outputs": "0" * 32}
    )
    other = SuiteSide({f"{file}::test_a": "passed"}, {f"{file}::test_a #0 outputs": "1" * 32})
    lone = SuiteSide({"tests/quant/test_two.py::test_c": "collected"}, {})

    def compared(here: SuiteSide, there: SuiteSide) -> tuple[int, str]:
        verdict = judge_places(here, there, (ROOT, ROOT), [file])
        return report_suite(here, there, verdict), capsys.readouterr().out

    status, shown = compared(one, one)
    assert status == 0
    assert "1 outputs and weights equal, 0 differ for documented reasons, 0 unexplained" in shown
    status, shown = compared(one, other)
    assert status == 1
    assert f"unexplained:\n    {file}::test_a #0 outputs" in shown
    assert f"tests here alone: 1\n    {file}::test_b" in shown
    assert f"tests that failed here: 1\n    {file}::test_b" in shown
    status, shown = compared(one, lone)
    assert status == 1, "nothing was compared"
    assert "tests there alone: 1\n    tests/quant/test_two.py: all of its 1 tests" in shown


def test_any_bit_is_in_the_hash() -> None:
    x = torch.tensor([0.0, 1.0, float("nan")])
    values = {"out": x}
    assert digest(values) == digest({"out": x.clone()})
    assert digest(values) != digest({"out": torch.tensor([-0.0, 1.0, float("nan")])})
    assert digest(values) != digest({"out": x.reshape(3, 1)})
    assert digest(values) != digest({"out": x.view(torch.int32)})
    assert digest(values) != digest({"other": x})


def test_distance() -> None:
    one, other = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0])
    assert distance(one, other).text == "1 of 3 values, by 1 at most, 13.2 dB"
    assert distance(one, other).ratio == pytest.approx(10 * math.log10(21))
    assert distance(one, other * math.nan).ratio == -math.inf, "no ratio is enough"
