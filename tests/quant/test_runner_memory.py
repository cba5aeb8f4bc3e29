"""octet-run with little memory, fewer threads than it is told, and a full disk: it works, or says why it cannot."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import quant

from . import fuzz_kills, killed_jobs
from .conftest import compiler

pytestmark = pytest.mark.skipif("OCTET_EMULATOR" in os.environ, reason="an emulator needs memory of its own")

STACK = 8 << 20
"""Bytes that each thread takes of the address space."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model whose layers are worth 16 threads, an input, and the output."""
    folder = tmp_path_factory.mktemp("memory")
    torch.manual_seed(0)
    x = torch.randn(64, 512)
    q = quant.quantize_static(nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 16)).eval(), [x])
    quant.save(q, folder / "model.q8", runner=True)
    numpy.save(folder / "model.npy", x.numpy())
    numpy.save(folder / "y.npy", q(x).numpy())
    return folder


def run(
    runner: Path,
    folder: Path,
    output: Path,
    threads: int,
    most: int,
    what: int = resource.RLIMIT_AS,
    *,
    model: str = "model",
) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        resource.setrlimit(what, (most, most))

    words = [runner / "octet-run", folder / f"{model}.q8", "--input", folder / f"{model}.npy", "--output", output]
    return subprocess.run(
        [*map(str, words), "--threads", str(threads)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
        restore_signals=False,  # a file that is too large is an error, no signal
    )


def test_threads_that_cannot_be_started_are_done_without(runner: Path, folder: Path, tmp_path: Path) -> None:
    """OpenMP ends the process, with a word of its own, where it cannot start one."""
    for most in range(5 * STACK, 12 * STACK, STACK // 2):
        done = run(runner, folder, tmp_path / "y.npy", 16, most)
        assert (done.returncode, done.stderr) == (0, ""), most
        assert numpy.array_equal(numpy.load(tmp_path / "y.npy"), numpy.load(folder / "y.npy"))


def test_memory_that_is_short_of_threads_ends_no_process(runner: Path, tmp_path: Path) -> None:
    """OpenMP ends threads that a small layer leaves out and starts them anew; and each thread keeps buffers."""
    killed_jobs.write_model(tmp_path, "recurrent")
    outcomes = set()
    for most in range(34 << 20, 60 << 20, 1 << 19):
        done = run(runner, tmp_path, tmp_path / "y.npy", 4, most, model="recurrent")
        assert done.returncode in (0, 1), (most, done.stderr)
        assert done.returncode == 0 or re.search("^octet-run: .*memory", done.stderr), (most, done.stderr)
        outcomes.add(done.returncode)
    assert 0 in outcomes


def test_each_allocation_that_fails_is_said(runner: Path, folder: Path, tmp_path: Path) -> None:
    """There is no memory for the words either."""
    compiler()
    program, count = str(runner / "octet-run"), tmp_path / "count"
    words = [program, str(folder / "model.q8"), "--input", str(folder / "model.npy"), "--threads", "1"]
    environment = {**os.environ, "LD_PRELOAD": str(fuzz_kills.compiled(tmp_path)), "OCTET_FAULT_LIBRARIES": "."}

    def run_without(place: int, action: int) -> subprocess.CompletedProcess[str]:
        faults = {"PLACE": place, "ACTION": action, "COUNT": count}
        now = environment | {f"OCTET_FAULT_{name}": str(value) for name, value in faults.items()}
        return subprocess.run(words, capture_output=True, text=True, check=False, env=now)

    assert run_without(-1, 0).returncode == 0
    calls = int(count.read_text(encoding="ascii"))
    for place in range(0, calls, max(1, calls // 100)):
        done = run_without(place, fuzz_kills.HOW_LONG["from there on"])
        assert done.returncode == 1, (place, done)
        assert "memory" in done.stderr, (place, done)


def test_too_little_memory_is_said(runner: Path, folder: Path, tmp_path: Path) -> None:
    outcomes = set()
    for most in range(4 << 20, 40 << 20, 1 << 20):
        done = run(runner, folder, tmp_path / "y.npy", 1, most)
        loader = "error while loading shared libraries" in done.stderr or done.returncode < 0  # it did not begin
        said = "memory" in done.stderr and done.stderr.startswith("octet-run: ")
        outcomes.add("began not" if loader else {0: "ran", 1: "said" if said else done.stderr}.get(done.returncode))
    assert outcomes - {"began not"} == {"ran", "said"}


def test_a_full_disk_leaves_the_old_output(runner: Path, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "y.npy"
    output.write_bytes(b"old")
    done = run(runner, folder, output, 1, 1000, resource.RLIMIT_FSIZE)
    assert (done.returncode, done.stderr) == (1, f"octet-run: cannot write {output}: File too large\n")
    assert [output.read_bytes(), *tmp_path.iterdir()] == [b"old", output]


def test_a_device_is_written_as_it_is(runner: Path, folder: Path) -> None:
    done = run(runner, folder, Path("/dev/full"), 1, 1 << 30)
    assert (done.returncode, done.stderr) == (1, "octet-run: cannot write /dev/full: No space left on device\n")
