"""How often the lines of a user's functions run in a recording: what Python counts by a size shows there.

Nothing tells a recorder that `range(n)` reads a size. Where the turns of a loop leave calls of the graph, a recording
of another size has other calls. A loop that only looks for its twentieth turn leaves none until there are as many; but
its lines run more often at once, in whatever file they stand.

Python also runs functions in between, when it frees objects: `__del__`, the callbacks of `weakref.finalize` and of the
garbage collector. When that is follows from what else the process has allocated; their lines do not count.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

from quant.capture.forward_code import FOREIGN, function_of

NOT_COUNTED = {*FOREIGN, __name__.partition(".")[0]}
"""Packages whose lines are not counted."""


class ExecutedLines:
    """The lines of a user's functions that run in one thread.

    A trace function of Python's counts them (`sys.settrace`), which belongs to one thread; that of a debugger is put
    back for the time in between, and afterwards. As Python asks it at every call of any function, it is off while
    others compute.
    """

    def __init__(self) -> None:
        self._runs: dict[types.CodeType, int] = {}
        self._is_users: dict[types.CodeType, bool] = {}
        self._freeing: types.FrameType | None = None
        self._frees: set[types.CodeType] = set()
        self._thread: int | None = None
        self._before: Any = None

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the lines of the functions that are called in this context, while it is switched on."""
        self._before, self._thread = sys.gettrace(), threading.get_ident()
        called = [function_of(weakref.finalize.__call__)]
        called += [function_of(one) or function_of(type(one).__call__) for one in gc.callbacks]
        self._frees = {function.__code__ for function in called if function is not None}
        try:
            yield
        finally:
            self.switch(False)
            self._thread = self._freeing = None

    def switch(self, on: bool) -> None:
        """Whether lines count from now on; without effect outside of `counting`, and in other threads."""
        if self._thread == threading.get_ident():
            sys.settrace(self._called if on else self._before)

    @property
    def codes(self) -> frozenset[types.CodeType]:
        """The code of the functions that ran."""
        return frozenset(self._runs)

    def differ_from(self, other: ExecutedLines) -> bool:
        """Whether a function ran other numbers of lines; one that ran in a single recording may be cached."""
        return any(runs != other._runs.get(code, runs) for code, runs in self._runs.items())

    def _called(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if self._freeing is not None:
            return None
        if frame.f_code in self._frees or frame.f_code.co_name == "__del__":
            self._freeing = frame
            frame.f_trace_lines = False
            return self._freed
        known = self._is_users.get(frame.f_code)
        if known is None:  # a capture makes a hundred thousand calls, of few functions
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            known = self._is_users[frame.f_code] = package not in NOT_COUNTED
        return self._line(frame, "line", None) if known else None

    def _line(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._runs[frame.f_code] = self._runs.get(frame.f_code, 0) + 1
        return self._line

    def _freed(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if event == "return":  # by an error too
            self._freeing = None
        return self._freed
