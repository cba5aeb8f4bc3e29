"""Resident memory at the peak of a call, as Linux counts it."""

from __future__ import annotations

import ctypes
import functools
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(call: Callable[[], object]) -> int | None:
    """Run a call; bytes of resident memory at its peak above those before it.

    None where the system does not say: it has no /proc/self/clear_refs, or this process may not write it. Writing it
    sets the peak that the system keeps of this process (VmHWM) to what is resident now. Memory that the process has
    freed is given back to the system first, where the C library can, or it would serve the call unseen.
    """
    before = _begin()
    call()
    if before is None:
        return None
    peak = _status("VmHWM")
    return None if peak is None else max(0, peak - before)


def _begin() -> int | None:
    """Bytes that are resident now, where the peak is counted from here on; else None."""
    gc.collect()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
    try:
        CLEAR.write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


@functools.cache
def _malloc_trim() -> Any:
    """The C library's function that gives freed memory back, or None."""
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # TypeError: on Windows
        return None


def _status(field: str) -> int | None:
    """Bytes of a field of this process's status."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024
