"""The page on the runner: its blocks in C, shell and torch-free Python run, in their order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "runner.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_on_the_runner(runner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("OCTET_EMULATED") == "1" or shutil.which("cc") is None:
        pytest.skip("no C compiler for this machine")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").symlink_to(runner)
    printed, namespace = "", {"__name__": "shown"}
    for language, text in BLOCK.findall(PAGE.read_text()):
        if language == "python":
            exec(compile(text, str(PAGE), "exec"), namespace)
        elif language == "c":
            named = re.match(r"/\* (\w+\.c)", text)
            assert named is not None
            (tmp_path / named[1]).write_text(text)
        elif language == "sh":
            printed += check(["sh", "-e", "-c", text])
        elif language == "py":
            check([sys.executable, "-c", text])
    assert "input image float32 (any, 3, any, any)" in printed
    assert "20 runs: median" in printed
    assert "2 x 10\ninput 'image' has 3 dimensions, expected 4\n" in printed
    assert (numpy.load("classes.npy") == numpy.load("expected.npy")).all()


def check(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
