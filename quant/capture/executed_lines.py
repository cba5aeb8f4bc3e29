"""How often the lines of a user's functions run in a recording: what Python counts by a size shows there.

Nothing tells a recorder that `range(n)` reads a size. Where the turns of a loop leave calls of the graph, a recording
of another size has other calls. A loop that only looks for its twentieth turn leaves none until there are as many; but
its lines run more often at once, in whatever file they stand.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from quant.capture.forward_code import FOREIGN

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
        self._thread: int | None = None
        self._before: Any = None

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the lines of the functions that are called in this context, while it is switched on."""
        self._before, self._thread = sys.gettrace(), threading.get_ident()
        try:
            yield
        finally:
            self.switch(False)
            self._thread = None

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
        known = self._is_users.get(frame.f_code)
        if known is None:  # a capture makes a hundred thousand calls, of few functions
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            known = self._is_users[frame.f_code] = package not in NOT_COUNTED
        return self._line(frame, "line", None) if known else None

    def _line(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._runs[frame.f_code] = self._runs.get(frame.f_code, 0) + 1
        return self._line
