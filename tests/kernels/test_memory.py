"""Memory that the system does not give is an error that says so, and the same call works when there is some."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quant.kernels import ops

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc/self/statm"),
    pytest.mark.skipif(os.environ.get("OCTET_EMULATED") == "1", reason="the emulator answers for the system's memory"),
    pytest.mark.skipif(bool(ops.extension_problem()), reason=f"the kernels' own memory: {ops.extension_problem()}"),
]


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    yield before
    resource.setrlimit(resource.RLIMIT_AS, before)


def leave(count: int) -> None:
    """So many bytes of address space."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + count
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def test_a_weight_that_finds_no_room_is_packed_later(limits: tuple[int, int]) -> None:
    """64 MiB: beyond what the C library keeps of memory that was given back."""
    weight, scale = torch.ones(8192, 8192, dtype=torch.int8), torch.ones(8192)
    x = torch.ones(1, 8192)
    leave(16 << 20)
    with pytest.raises(MemoryError, match=r"out of memory: the system has no 6\d{7} bytes for a packed weight"):
        torch.ops.octet.linear_dynamic(x, weight, scale, None, None, 8, True, False, "native")
    resource.setrlimit(resource.RLIMIT_AS, limits)
    y = torch.ops.octet.linear_dynamic(x, weight, scale, None, None, 8, True, False, "native")
    assert torch.equal(y, torch.full((1, 8192), 8192.0))
