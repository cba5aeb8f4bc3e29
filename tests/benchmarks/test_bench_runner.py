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
    command = [sys.executable, "benchmarks/bench_runner.py", "--only", "MobileNetV2", "--rounds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=CHECKOUT, env=environment)
    assert done.returncode == 0, done.stderr
    title, *numbers = done.stdout.splitlines()[-1].split()
    assert title == "MobileNetV2"
    assert all(float(number) > 0 for number in numbers)
