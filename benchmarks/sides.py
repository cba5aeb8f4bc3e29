"""Two checkouts measured against each other, for the benchmarks that ask whether something became slower.

Each side is a checkout whose package child processes import. A child lives on and is asked for one lap at a time, the
sides in turns, so that a machine that slows down slows both; or it is a fresh one, for what happens once in a process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # where `architecture` is a package
from architecture.sources import FOLDERS, link  # noqa: E402

HERE, THERE = "here", "there"

EVEN = 0.03
"""A median this much above its goal is no difference: two runs of the same checkout differ by so much."""

REACHED, UNSURE = "reached", "unsure"


class Side:
    """One checkout, whose package children import.

    Attributes:
        name: `HERE` or `THERE`.
        folder: for its files.
    """

    def __init__(self, name: str, checkout: Path, folder: Path, child: Path, threads: int = 1) -> None:
        self.name, self.folder, self._child_script = name, folder, child
        site = folder / "site"
        site.mkdir()
        link(checkout, site)
        own = {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": str(threads)}
        self.environment = {**os.environ, **own}
        self._server: subprocess.Popen[str] | None = None

    def lap(self, case: str) -> dict[str, float]:
        """Seconds by row, of one lap in the process that lives on."""
        if self._server is None:
            self._server = self._child("serve", stdin=subprocess.PIPE)
        assert self._server.stdin is not None
        self._server.stdin.write(case + "\n")
        self._server.stdin.flush()
        return answer(self._server)

    def fresh(self, what: str, case: str) -> dict[str, float]:
        """Seconds by row, of a process of its own."""
        with self._child(what, case) as process:
            return answer(process)

    def _child(self, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
        command = [sys.executable, str(self._child_script), *arguments, str(self.folder)]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True, **streams)

    def close(self) -> None:
        """End the process that lives on."""
        if self._server is not None:
            self._server.communicate()


def answer(process: subprocess.Popen[str]) -> dict[str, float]:
    """A line of JSON.

    Raises:
        RuntimeError: the process ended instead; what it had to say stands on stderr.
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{' '.join(map(str, process.args))}: it ended with {process.wait()}, and gave no figures")
    seconds: dict[str, float] = json.loads(line)
    return seconds


@contextmanager
def opened(checkouts: Mapping[str, Path | None], child: Path, threads: int = 1) -> Iterator[list[Side]]:
    """A side for each checkout that there is."""
    with ExitStack() as stack:
        sides = []
        for name, checkout in checkouts.items():
            if checkout is not None:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                sides.append(Side(name, checkout, Path(folder), child, threads))
                stack.callback(sides[-1].close)
        yield sides


def turn(sides: Sequence[Side], round_: int) -> Sequence[Side]:
    """The sides of a round, in its order."""
    return sides if round_ % 2 == 0 else sides[::-1]


def note(races: dict[str, harness.Race], case: str, side: Side, seconds: Mapping[str, float]) -> None:
    """Put a side's figures to those of earlier rounds."""
    for row, value in seconds.items():
        race = races.setdefault(row, harness.Race(case, {"row": row}))
        race.seconds.setdefault(side.name, []).append(value)


def compared(race: harness.Race, most: float) -> str:
    """Whether this side takes no more than `most` of the other's time."""
    ratio = race.ratio(HERE, THERE)
    if ratio.median <= most + EVEN:
        return REACHED
    return f"NOT reached: {ratio.median:.2f} of {most:g}" if ratio.low > most else UNSURE


def checkout(text: str) -> Path:
    """The folder of a checkout, as an argument of a command line."""
    missing = [name for name in FOLDERS.values() if not Path(text, name).is_dir()]
    if missing:
        raise argparse.ArgumentTypeError(f"{text} is no checkout of this package: it has no {missing[0]}/")
    return Path(text)
