"""Slices of `make stress` and `make stress-runner`, and the runner in a process that forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quant.kernels import ops
from torch import Tensor, nn

import quant

from .conftest import CHECKOUT, RUNNER, compiler
from .runner_models import converted, image, outputs_of
from .stress_runner import stress

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and counts of memory, are Linux's"),
    pytest.mark.skipif(bool(ops.extension_problem()), reason=f"the kernels: {ops.extension_problem()}"),
    pytest.mark.skipif(os.environ.get("OCTET_EMULATED") == "1", reason="minutes, emulated"),
]

PARTS = ("forks", "first calls", "signals", "made and dropped", "threads", "long")
"""Those of a second or so; forks first, while the process has no threads."""


def test_a_slice_of_models() -> None:
    words = [word for part in PARTS for word in ("--part", part)]
    command = [sys.executable, "tests/quant/stress.py", "--seconds", "0.2", "--threads", "16", *words]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == list(PARTS)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, Tensor]:
    """A model, its file, and an input whose work threads share."""
    model, path = converted("residual"), tmp_path_factory.mktemp("large") / "model.q8"
    quant.save(model, path, runner=True)
    return model, path, image(4, 3, 96, 96)


def test_a_slice_of_the_runner(runner: Path, large: tuple[nn.Module, Path, Tensor], tmp_path: Path) -> None:
    """Without a sanitizer: what threads give, their errors, and that no memory is left of models that were open."""
    program = tmp_path / "stress"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-pthread", "-iquote", RUNNER]
    libraries = [f"-L{runner}", "-loctet", f"-Wl,-rpath,{runner}"]
    command = [compiler(), *flags, RUNNER / "stress.cpp", *libraries, "-o", program]
    compiled = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    done = stress(program, 0.5, 8, 1, [large[1]])
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("; 0 wrong\n")


FORKS = """
import sys, warnings
from pathlib import Path
import torch
sys.path.append(sys.argv[1])
from tests.quant.test_runner import Library
x, expected = torch.load(sys.argv[4])
if sys.argv[5:] == ["others"]:
    torch.set_num_threads(2)
    torch.ones(4096, 1024).add(1)
warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
Library(Path(sys.argv[2])).check_forks(Path(sys.argv[3]), x, expected)
"""


@pytest.mark.parametrize("beside", ["alone", "others"])
def test_the_runner_before_and_after_a_fork(
    runner: Path, large: tuple[nn.Module, Path, Tensor], tmp_path: Path, beside: str
) -> None:
    """Whose threads are OpenMP's, which another library may have started; with a pool: test_runner.py."""
    model, path, x = large
    torch.save((x, outputs_of(model, [x])[0]), tmp_path / "example.pt")
    words = [sys.executable, "-c", FORKS, CHECKOUT, runner, path, tmp_path / "example.pt", beside]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
