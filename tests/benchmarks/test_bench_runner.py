"""The benchmark of the torch-free runner runs, and finds the bits of Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


def test_it_measures_a_network() -> None:
    if not (CHECKOUT / "build" / "liboctet.so").exists():
        pytest.skip("build/liboctet.so is missing: `make runner` compiles it")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, "benchmarks/bench_runner.py", "--only", "MobileNetV2", "--rounds", "2", "--threads"]
    command += ["1", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=CHECKOUT, env=environment)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert [row[:2] for row in rows] == [["MobileNetV2", "1"], ["MobileNetV2", "2"]]
    agreement = ["=", "loaded,", "=", "Python"]
    assert [row[-len(agreement) :] for row in rows] == [agreement, agreement]
    assert all(float(number) > 0 for row in rows for number in row[2 : -len(agreement)])
    assert [len(row) - len(agreement) for row in rows] == [12, 9]
