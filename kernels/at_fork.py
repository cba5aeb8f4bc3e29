"""What a fork leaves usable in the child. Locks of the compiled kernels: csrc/torch/at_fork.h."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable


def forked_lock() -> threading.Lock:
    """A lock that no child of a fork finds held; it is kept as long as the process lives.

    A fork copies a lock that another thread holds as it is, and that thread is not in the child: whoever asks for it
    there waits for ever. The thread that forks takes this one before, so that what it guards is whole in the child too.
    So none may be asked for while another is held.
    """
    lock = threading.Lock()
    if sys.platform != "win32":
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


def call_around_forks(before: Callable[[], object], in_child: Callable[[], object]) -> None:
    """Call a function before each fork, in the thread that forks, and one in each child before anything else of it."""
    if sys.platform != "win32":
        os.register_at_fork(before=before, after_in_child=in_child)


class Turns:
    """A lock that a thread may take again while it has it; in the child of a fork free, where another thread had it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        call_around_forks(lambda: None, self._renew)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _renew(self) -> None:
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock = threading.RLock()
