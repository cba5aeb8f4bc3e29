"""What the tests of dynamic layers share: the name of every backend in turn, and the same start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from quant.kernels import dispatch

from quant.artefact.file import CONSTANT, read, write

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
NAMES = ["native", "reference"] if FAST else list(dispatch.available())
"""Emulated, the kernels' own tests go through all: what layers do around a backend is the same on every machine."""


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend of NAMES that can be used here; the skip of another says why it cannot."""
    name: str = request.param
    reason = dispatch.available()[name]
    if reason:
        pytest.skip(f"{name}: {reason}")
    return name


@pytest.fixture
def seeded_on_one_thread() -> Iterator[None]:
    """These tensors are too small to share."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def without_programs() -> Callable[[Path], None]:
    """Takes programs, and what was noted for them, out of a file: versions before wrote such, which are captured."""

    def take_out(path: Path) -> None:
        manifest, tensors = read(path)
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(CONSTANT)}
        for description in manifest["static"].values():
            for name in ("removed", "fingerprint"):
                del description[name]
        write(path, own, {name: manifest[name] for name in ("static", "modules", "report", "float_bytes")})

    return take_out
