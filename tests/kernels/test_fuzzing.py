"""Slices of `make fuzz-arguments`, `fuzz-kernels` and `fuzz-plans`; what is wrong is found and made smaller."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from quant.kernels import ops, plan_check

from . import fuzz_arguments, fuzz_plans, random_calls
from .conftest import FAST
from .fuzzing import Draws
from .guarded import Guarded

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and limits of memory, are Linux's"),
    pytest.mark.skipif(FAST, reason="OCTET_FAST_TESTS=1: processes that import torch take most of a minute each"),
]
ROOT = Path(__file__).resolve().parents[2]


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, program, *words]
    environment = {**os.environ, "OCTET_FUZZ_SECONDS": "4"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("name", ["arguments", "kernels", "plans"])
def test_a_slice(name: str) -> None:
    """Some seconds of each, and no more than some hundred cases."""
    if name != "arguments" and ops.extension_problem():
        pytest.skip(f"what is compared with the reference is the extension: {ops.extension_problem()}")
    done = run(f"tests/kernels/fuzz_{name}.py", "--count", "600")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert ", the next is --seed " in done.stdout
    assert done.stdout.endswith("; 0 failures\n")


FAILING = """
import os, sys, time
sys.path.append({root!r})
from tests.kernels import fuzzing
from tests.kernels.fuzzing import Draws, Fuzzer, Wrong

fuzzing.HANG_SECONDS = 1.0
fuzzing.SMALLER_SECONDS = 600.0

def check(kind, draws, drawn):
    first, second = draws.below(100), draws.below(100)
    drawn()
    if kind == "ends" and first > 20:
        os.abort()
    if kind == "hangs" and first > 98:
        time.sleep(60)
    if kind == "wrong" and first + second > 150:
        raise Wrong("more than 150")
    if kind == "raises" and second > 50:
        raise KeyError("nothing")
    return "ran"

kinds = sys.argv.pop().split(",")
sys.exit(fuzzing.main(Fuzzer("this.py", kinds, check, words=lambda: "in words"), None))
"""


@pytest.mark.parametrize(
    ("kind", "message", "draws"),
    [
        ("ends", "the process ended by SIGABRT", "21"),
        ("hangs", "hangs: no answer in 1 s", "99"),
        ("wrong", "more than 150", None),
        ("raises", "KeyError at failing.py", "0,51"),
    ],
)
def test_it_finds_what_is_wrong(tmp_path: Path, kind: str, message: str, draws: str | None) -> None:
    program = tmp_path / "failing.py"
    program.write_text(FAILING.format(root=str(ROOT)), encoding="utf-8")
    count = "400" if kind == "hangs" else "60"
    done = run(str(program), "--count", count, "--seconds", "200", kind)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{message}" in done.stdout
    assert "in words" in done.stdout
    words = [line for line in done.stdout.split("\n") if line.startswith("    python this.py")]
    assert len(words) == 1, done.stdout
    found = words[0].split()[-1]
    assert draws in (found, None), done.stdout
    if draws is None:
        assert sum(map(int, found.split(","))) == 151
    again = run(str(program), "--case", kind, "--draws", found, kind)
    assert (again.returncode, message in again.stdout) == (1, True)


def test_a_case_that_hangs_ends_with_the_program(tmp_path: Path) -> None:
    program, told = tmp_path / "hanging.py", tmp_path / "pid"
    hanging = f"import pathlib; pathlib.Path({str(told)!r}).write_text(str(os.getpid())); time.sleep(600)"
    text = FAILING.format(root=str(ROOT)).replace("HANG_SECONDS = 1.0", "HANG_SECONDS = 600.0")
    program.write_text(text.replace("time.sleep(60)", hanging), encoding="utf-8")
    with subprocess.Popen([sys.executable, str(program), "--case", "hangs", "--draws", "99", "hangs"]) as process:
        until = time.monotonic() + 120
        while not (told.exists() and told.read_text()):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        process.kill()
    child = Path(f"/proc/{told.read_text()}/stat")
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


def test_draws_are_those_of_their_seed_or_given() -> None:
    one, other = Draws("linear 7"), Draws("linear 7")
    assert [one.below(9) for _ in range(50)] == [other.below(9) for _ in range(50)]
    again = Draws(one.taken)
    assert [again.below(9) for _ in range(50)] == one.taken
    assert (again.below(9), Draws([]).choice("abc"), Draws([7]).below(3)) == (0, "a", 2)


@pytest.mark.parametrize("at_end", [True, False], ids=["behind", "before"])
def test_a_byte_too_many_ends_the_process(at_end: bool) -> None:
    place = "5" if at_end else "-1"
    code = (
        f"import ctypes, sys, torch; sys.path.append({str(ROOT)!r}); from tests.kernels.guarded import Guarded\n"
        f"x = Guarded().copy(torch.arange(5, dtype=torch.uint8), at_end={at_end}); assert x.tolist()[3:] == [3, 4]\n"
        f"print('read', flush=True); ctypes.string_at(x.data_ptr() + {place}, 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode < 0) == ("read\n", True), done.stderr


def test_guarded_memory_is_used_again() -> None:
    memory, values = Guarded(), torch.arange(3000, dtype=torch.int32)
    first = memory.copy(values).data_ptr()
    memory.free()
    assert memory.copy(values).data_ptr() == first
    assert memory.copy(values).data_ptr() != first


def test_every_operator_is_drawn() -> None:
    """Those of schemas.inc, those of the registry of torch that are of this package, and every operation of plans."""
    assert set(random_calls.CALLS) == set(ops.SCHEMAS)
    assert set(fuzz_plans.GENERATORS) == set(plan_check.table())
    drawn = {f"octet::{name}" for name in random_calls.CALLS} | set(fuzz_arguments.NATIVE)
    assert set(fuzz_arguments.operators()) <= drawn
    if not ops.extension_problem():
        assert drawn <= set(fuzz_arguments.operators())
