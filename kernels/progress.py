"""Progress on standard error: a bar on a terminal, elsewhere one line at the start and one at the end.

So a log has two lines of a run, and nothing in it moves a cursor.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Protocol


class Progress(Protocol):
    """A run that is under way, as a context."""

    def update(self, n: int = 1) -> object:
        """So many more are done."""

    def unpause(self) -> None:
        """Leave the time until now out of the rate."""

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Words about the state, behind the numbers."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any: ...


def progress_of(what: str | None, *, unit: str, total: int | None, shown: bool = True, initial: int = 0) -> Progress:
    """Progress of a run.

    Args:
        what: is done, the first words of each line; None prints nothing.
        unit: of what is counted, in the singular.
        total: how many there are; None where that is not known.
        shown: False prints nothing.
        initial: how many are done already.
    """
    if what is None or not shown or sys.stderr is None:
        return _Nothing()
    if not sys.stderr.isatty():
        return _Lines(what, unit, total, initial)
    from tqdm import tqdm  # not with the package: kernels are imported where nothing is shown

    bar: Progress = tqdm(total=total, initial=initial, desc=what, unit=unit, file=sys.stderr, dynamic_ncols=True)
    return bar


class _Nothing:
    """Says nothing."""

    def update(self, n: int = 1) -> None:
        pass

    def unpause(self) -> None:
        pass

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class _Lines(_Nothing):
    """A line at the start and one at the end."""

    def __init__(self, what: str, unit: str, total: int | None, initial: int) -> None:
        self._what, self._total, self._done, self._words = what, total, initial, ""
        self._unit, self._units = unit, f"{unit}es" if unit.endswith("ch") else f"{unit}s"
        self._began = time.monotonic()
        counted = "" if total is None else f": {total} {self._named(total)}"
        self._say(counted + (f", {initial} of them done before" if initial else ""))

    def update(self, n: int = 1) -> None:
        self._done += n

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        self._words = s

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        verdict = "done" if error is None else "stopped"
        of = "" if self._total is None else f" of {self._total}"
        words = f"; {self._words}" if self._words else ""
        seconds = time.monotonic() - self._began
        unit = self._named(self._done if self._total is None else self._total)
        self._say(f": {verdict}, {self._done}{of} {unit} in {seconds:.1f} s{words}")

    def _named(self, count: int) -> str:
        """What is counted, one of it or several."""
        return self._unit if count == 1 else self._units

    def _say(self, words: str) -> None:
        print(f"{self._what}{words}", file=sys.stderr, flush=True)
