"""Slices of `make fuzz-kills`; and it finds what is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and a preloaded library, are Linux's"),
    pytest.mark.skipif("OCTET_EMULATOR" in os.environ, reason="nothing is preloaded under an emulator"),
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler: neither $CXX nor g++ was found"
    ),
    pytest.mark.skipif(
        os.environ.get("OCTET_FAST_TESTS") == "1", reason="OCTET_FAST_TESTS=1: processes that import torch are slow"
    ),
]
ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OCTET_FUZZ_SECONDS": "4"}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def test_a_slice() -> None:
    done = run("tests/quant/fuzz_kills.py", "--count", "40")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert ", the next is --seed " in done.stdout
    assert done.stdout.endswith("; 0 failures\n")


BROKEN = """
import sys
sys.path.append({root!r})
from quant.calibrate.whole_files import replace_file
from tests.quant import fuzz_kills
from tests.quant.killed_jobs import JOBS, Job, old_file

def in_place(folder, note):
    (folder / "one.json").write_text("x" * 1000)
    return ""

def with_temporary(folder, note):
    (folder / "one.tmp").write_text("x" * 1000)
    (folder / "one.tmp").rename(folder / "one.json")
    return ""

def nameless(folder, note):
    try:
        return whole(folder, note)
    except OSError as error:
        raise OSError(error.errno, "no") from error

def whole(folder, note):
    replace_file(folder / "one.json", "new", "a test")
    return ""

def forgetful(folder, note):
    begun = (folder / "one.json").exists()
    (folder / ".one.json.partial").write_text("x")
    (folder / ".one.json.partial").rename(folder / "one.json")
    return "another" if begun else ""

jobs = in_place, with_temporary, nameless, forgetful, whole
for run in jobs:
    JOBS[run.__name__] = Job(run, old_file("one.json") if run is not forgetful else lambda folder: None, ("one.json",))
sys.argv[1:] = ["--every", *(run.__name__ for run in jobs)]
sys.exit(fuzz_kills.main())
"""


def test_it_finds_what_is_wrong(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text(BROKEN.format(root=str(ROOT)), encoding="utf-8")
    done = run(str(program))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "in_place: one.json is neither old nor new: 0 bytes" in done.stdout
    assert "in_place: one.json is neither old nor new: 500 bytes" in done.stdout
    assert "with_temporary: leaves one.tmp" in done.stdout
    assert "forgetful: another result than that of one run" in done.stdout
    assert "nameless: an error that does not say it: {'type': 'OSError', 'text': '[Errno 28] no'}" in done.stdout
    assert ": whole: " not in done.stdout  # each call of one job that is as it has to be
