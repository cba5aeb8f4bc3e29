"""What a thread keeps until it ends: asked for again by what ends later, it is made anew, and nothing stays."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from quant.kernels import build

CPU = build.SOURCES / "core" / "cpu"
PROGRAM = Path(__file__).resolve().parent / "core_program" / "of_thread.cpp"

if os.environ.get("OCTET_EMULATED"):
    pytest.skip("OCTET_EMULATED=1: the compiler in there is this machine's own", allow_module_level=True)


@pytest.mark.parametrize("sanitizer", ["none", "address"])
def test_what_ends_later_in_a_thread_has_an_object_of_its_own(sanitizer: str, tmp_path: Path) -> None:
    cxx = build.find_compiler()
    if cxx is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "of_thread"
    flags = ["-std=c++20", "-O1", "-pthread", "-iquote", str(build.SOURCES)]
    sources = [PROGRAM, CPU / "of_thread.cpp", CPU / "memory.cpp"]
    if sanitizer != "none":
        flags.append(f"-fsanitize={sanitizer}")
    command = [cxx, *flags, *map(str, sources), "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode and "asan" in result.stderr:
        pytest.skip("the compiler has no address sanitizer")
    assert result.returncode == 0, result.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    # One of main's, which has not ended yet; one of the thread's, and one more for what ended behind it.
    assert ran.stdout.split() == ["3", "2", "6"]
