"""What the tests of dynamic layers share: the name of every backend in turn, and the same start."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from quant.kernels import dispatch

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
