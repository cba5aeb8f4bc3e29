"""`make sanitize`: what its environment finds in a library that is loaded as the extension is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from quant.kernels import build

from . import sanitize
from .conftest import FAST

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libraries are preloaded on Linux"),
    pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler: neither $CXX nor g++ nor clang++"),
    pytest.mark.skipif(FAST, reason="OCTET_FAST_TESTS=1: nothing is preloaded under an emulator"),
]

SOURCE = """
extern "C" int element(int place) {
  int* const four = new int[4]{1, 2, 3, 4};
  const int value = four[place];
  delete[] four;
  return value;
}
extern "C" int freed() {
  int* const one = new int{1};
  delete one;
  return *static_cast<volatile int*>(one);
}
extern "C" int doubled(int value) { return 2 * value; }
extern "C" int caught() {
  try { throw 1; } catch (int value) { return value; }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitize")
    (folder / "wrong.cpp").write_text(SOURCE, encoding="utf-8")
    command = [build.require_compiler(), *sanitize.FLAGS, "-shared", "-fPIC", str(folder / "wrong.cpp")]
    subprocess.run([*command, "-Wl,--allow-shlib-undefined", "-o", str(folder / "wrong.so")], check=True)
    return folder / "wrong.so"


@pytest.mark.parametrize(
    ("call", "report"),
    [
        ("element(3)", ""),
        ("caught()", ""),
        ("element(5)", "wrong.cpp:4:"),
        ("freed()", "heap-use-after-free"),
        ("doubled(1 << 30)", "signed integer overflow"),
    ],
)
def test_what_is_reported(library: Path, call: str, report: str) -> None:
    """Outside of memory, and beyond what C++ defines; in a process that knows nothing of it."""
    if not Path(sanitize.library("libasan.so")).exists():
        pytest.skip("the compiler has no AddressSanitizer")
    program = f"import ctypes; ctypes.CDLL({str(library)!r}).{call}"
    around = sanitize.environment(library)
    done = subprocess.run([sys.executable, "-c", program], env=around, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == bool(report), done.stderr
    assert (report in done.stderr) if report else not done.stderr
