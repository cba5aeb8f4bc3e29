"""The verdicts of `make bench-qat`, and that weights are kept only for the code that made them."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    pytest.importorskip("matplotlib", reason="the tutorials' plots need matplotlib")
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(CHECKOUT / "benchmarks"))
    yield importlib.import_module("training_accuracy")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(CHECKOUT / "tutorials")):
            del sys.modules[name]  # tests/tutorials loads its own


def run(accuracy: ModuleType, **changes: Any) -> Any:
    one = accuracy.Run("cnn", 0, 0.9134, 0.9130, 0.9130, 0.9995, 1e-6, 1.0, True, None)
    return dataclasses.replace(one, **changes)


def test_a_good_run_is_ok(accuracy: ModuleType) -> None:
    runs = [run(accuracy, seed=seed) for seed in range(3)]
    assert accuracy.verdict(accuracy.STUDIES["cnn"], runs) == "ok"
    text = accuracy.table(runs)
    assert "91.34" in text
    assert "-0.04" in text
    assert "cnn, seed 2" in text


@pytest.mark.parametrize(
    ("study", "changes", "says"),
    [
        ("cnn", {"qat": 0.9120}, "WORSE than float"),
        ("cnn", {"same": 0.9989}, "CLASSES not those trained"),
        ("cnn", {"holds": False}, "values MORE than one step off"),
        ("4bit", {"qat": 0.9100, "ptq": 0.9040}, "PTQ keeps the limit TOO"),
    ],
    ids=["accuracy", "classes", "steps", "ptq"],
)
def test_a_broken_limit_is_said(accuracy: ModuleType, study: str, changes: dict[str, Any], says: str) -> None:
    assert accuracy.verdict(accuracy.STUDIES[study], [run(accuracy, **changes)]) == says


def test_the_limit_itself_is_kept(accuracy: ModuleType) -> None:
    assert accuracy.verdict(accuracy.STUDIES["cnn"], [run(accuracy, qat=0.9124)]) == "ok"


def test_other_settings_have_other_weights(accuracy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    first = accuracy._weights_path("cnn", 0)
    assert accuracy._weights_path("cnn", 1) != first
    longer = dataclasses.replace(accuracy.STUDIES["cnn"], epochs=7)
    monkeypatch.setitem(accuracy.STUDIES, "cnn", longer)
    assert accuracy._weights_path("cnn", 0) != first


def test_a_peak_is_the_training_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process must not report what its parent once held."""
    monkeypatch.syspath_prepend(str(CHECKOUT / "benchmarks"))
    cost = importlib.import_module("training_cost")
    if importlib.import_module("bench_calibration").resident() is None:
        pytest.skip("this system does not say how much memory a process holds")
    ballast = bytearray(600 * 2**20)
    ballast[::4096] = b"1" * len(ballast[::4096])
    assert cost.peak("ResNet-18", cost.FLOAT) < 550 * 2**20
