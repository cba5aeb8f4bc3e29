"""Threads that wait for each other: in step, without a data race, more threads than cores, and where one fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from quant.kernels import build

PROGRAM = Path(__file__).resolve().parent / "core_program" / "team.cpp"
SOURCES = [build.SOURCES / "core" / "cpu" / "team.cpp", PROGRAM]

if os.environ.get("OCTET_EMULATED"):
    pytest.skip("OCTET_EMULATED=1: the compiler in there is this machine's own", allow_module_level=True)


@pytest.fixture(scope="module", params=["plain", "thread"])
def team(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program; as "thread" under the sanitizer of that name, which ends it at the first data race."""
    cxx = build.find_compiler()
    if cxx is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("team") / "team"
    sanitizer = ["-fsanitize=thread"] if request.param == "thread" else []
    flags = ["-std=c++20", "-O2", "-pthread", *sanitizer, "-iquote", str(build.SOURCES)]
    result = subprocess.run(
        [cxx, *flags, *map(str, SOURCES), "-o", str(program)], capture_output=True, text=True, check=False
    )
    if result.returncode and sanitizer and "tsan" in result.stderr:
        pytest.skip("the compiler has no thread sanitizer")
    assert result.returncode == 0, result.stderr
    return program


def run(program: Path, *arguments: object) -> str:
    command = [str(program), *map(str, arguments)]
    options = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=options)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("members", [2, 3, 9])
def test_nobody_goes_on_before_all_have_arrived(team: Path, members: int) -> None:
    assert run(team, "rounds", members, 500).split() == ["500"] * members


@pytest.mark.parametrize("members", [2, 5])
def test_what_one_throws_ends_the_others_and_reaches_the_caller(team: Path, members: int) -> None:
    assert run(team, "throw", members) == "the last one"


def test_a_team_is_as_large_as_there_are_threads(team: Path) -> None:
    assert run(team, "fewer", 4) == "1"


@pytest.mark.parametrize("team", ["plain"], indirect=True)
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be bound to a core here")
def test_members_that_share_a_core_do_not_wait_for_each_other_in_vain(team: Path) -> None:
    # 180 microseconds where each of them looks for the others in every round, and 10 otherwise.
    assert float(run(team, "crowded", 4, 500)) < 60
