"""What the kernel tests share: every backend in turn, and a fresh Python process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from quant.kernels import build, dispatch
from quant.kernels.backend import Backend

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"


FIXED = ("QUANT_ISA", "QUANT_BACKEND", "ONEDNN_MAX_CPU_ISA")
"""What a fresh process does not inherit, because its test sets it."""

COMPILED = dispatch.ops.LIBRARIES
"""The backends of the extension."""

REASONS = dispatch.available()
"""Name of each backend -> why it cannot be used here, or ''. Asked once: `available` reads the entry points of every
installed package, which took two thirds of a small test."""


def found(name: str) -> Backend:
    reason = REASONS[name]
    if reason:
        pytest.skip(f"{name}: {reason}")
    return dispatch.find(name)


def tested(names: Iterable[str]) -> list[str]:
    """The backends of these names that a fixture gives: all, of which a missing one's skips say why.

    Without the compiled kernels, and under emulation, no more than one of those that are missing: thousands of tests
    would say what was decided, or that FBGEMM is for x86-64, for a minute.
    """
    names = list(names)
    if not (os.environ.get("QUANT_EXTENSION") == "none" or (FAST and not dispatch.ops.extension_problem())):
        return names
    usable = [name for name in names if not REASONS[name]]
    return usable or names[:1]


@pytest.fixture(params=tested(REASONS))
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend that can be used here; the skip of another says why it cannot."""
    return found(request.param)


@pytest.fixture(params=["native"] if FAST else tested(COMPILED))
def compiled(request: pytest.FixtureRequest) -> Backend:
    """Each backend of the extension, which has operators of its own around the product.

    Emulated, one: what stands around a product is the same code for each, which runs on x86-64 too, and the products
    of all have tests by `backend`.
    """
    return found(request.param)


@pytest.fixture(params=tested(name for name in REASONS if name not in COMPILED))
def interpreted(request: pytest.FixtureRequest) -> Backend:
    """Each backend that brings a product and computes the rest with the reference's own code."""
    return found(request.param)


@pytest.fixture
def extension() -> None:
    """Skips where the compiled kernels are not loaded."""
    problem = dispatch.ops.extension_problem()
    if problem:
        pytest.skip(problem)


@pytest.fixture(scope="session")
def core_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core's static library: what `make build` and `make core` left, where that is current, else one of its own."""
    if os.environ.get("OCTET_EMULATED") == "1":
        pytest.skip("no C++ compiler for the emulated machine")
    cxx = build.find_compiler()
    if cxx is None:
        pytest.skip("no C++ compiler: neither $CXX nor g++ nor clang++")
    if shutil.which("ar") is None:
        pytest.skip("no archiver: ar")
    kept = Path(__file__).resolve().parents[2] / "build" / "core" / "liboctet_core.a"
    if build.core_is_current(cxx, build.host_arch(), kept):
        return kept
    return build.build_core(cxx, build.host_arch(), tmp_path_factory.mktemp("core") / kept.name)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread unless a test asks for more: on a busy machine, threads that wait cost more than tiny layers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run_python() -> Callable[..., str]:
    """run_python(code, NAME=value, ...) runs code in a fresh process with that environment and returns what it prints.

    What is fixed at import or at the first call (QUANT_ISA, QUANT_BACKEND, QUANT_EXTENSION) can only be tested so.
    """
    if FAST:
        pytest.skip("OCTET_FAST_TESTS=1: a process that imports torch takes most of a minute under emulation")

    def run(code: str, **environment: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if name not in FIXED}
        result = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env={**inherited, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    return run
