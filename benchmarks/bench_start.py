"""What comes before a model runs: import, prepare, convert, load, first calls (`make bench-start`).

    python benchmarks/bench_start.py                        # this checkout alone
    python benchmarks/bench_start.py --against ../older     # and another one, its kernels built: is nothing slower?

Each checkout has a process of its own that is asked for one lap of a case at a time, in turns, and fresh processes for
what happens once in a process. Exit status 1 where a goal is not reached; README.md says how the output is read.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import display
import harness
import numpy as np
from sides import HERE, REACHED, ROOT, THERE, UNSURE, Side, checkout, compared, note, opened, turn
from start_child import CASES
from tqdm import tqdm

CHILD = Path(__file__).with_name("start_child.py")

LAPS, FRESH = 25, 7
"""Laps of each case, and fresh processes of each kind; a fresh one takes seconds, most of them for importing torch."""

ROWS = (
    "prepare",
    "calibrate",
    "convert",
    "quantize_static",
    "first call",
    "steady call",
    "new shape",
    "load",
    "first call after load",
    "import quant",
    "import, load, call",
    "import, quantize, call",
)
PARTS = ("calibrate", "convert")
"""Rows that are shown and not judged: they are parts of `quantize_static`, which is."""

GOAL = 1.0
"""Most time of a row, in times of the other checkout's."""
PATIENCE = 3
"""Times the usual laps that a case may take whose verdict is not clear."""


def measure(
    sides: Sequence[Side], case: str, laps: int, fresh: int, goals: Mapping[str, float]
) -> dict[str, harness.Race]:
    """Every row of one case, the sides in turns, each round begun by another; by row."""
    races: dict[str, harness.Race] = {}
    for side in sides:
        side.lap(case)  # which saves the file, and packs, compiles and imports what is needed once
    done = 0
    while done < laps or (done < PATIENCE * laps and any(verdict(race, goals) == UNSURE for race in races.values())):
        for side in turn(sides, done):
            note(races, case, side, side.lap(case))
        done += 1
    for round_ in range(fresh):
        for side in turn(sides, round_):
            for what in ("load", "quantize"):
                note(races, case, side, side.fresh(what, case))
    return races


def verdict(race: harness.Race, goals: Mapping[str, float]) -> str:
    """Whether the row takes no more of the other checkout's time than its goal; '' where nobody asks."""
    row = race.shape["row"]
    if THERE not in race.seconds or row in PARTS:
        return ""
    return compared(race, goals.get(row, GOAL))


def table(races: Mapping[str, harness.Race], goals: Mapping[str, float]) -> str:
    """A row for each thing measured of one case."""
    rows = []
    for row, race in races.items():
        cells = [spread(race.seconds[name]) if name in race.seconds else "" for name in (HERE, THERE)]
        ratio = race.ratio(HERE, THERE) if THERE in race.seconds else None
        between = "" if ratio is None else f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        rows.append([row, *cells, between, verdict(race, goals)])
    case = next(iter(races.values())).case
    return display.table([case, HERE, THERE, f"{HERE} / {THERE}", "verdict"], rows)


def spread(seconds: Sequence[float]) -> str:
    """Median and quartiles."""
    low, middle, high = (display.duration(float(one)) for one in np.quantile(seconds, [0.25, 0.5, 0.75]))
    return f"{middle} [{low}, {high}]"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=checkout, metavar="CHECKOUT", help="another checkout, its kernels built")
    parser.add_argument("--checkout", type=checkout, default=ROOT, help="of this side (default: the one of this file)")
    parser.add_argument("--only", metavar="REGEX", default="", help="only the cases whose name it finds")
    parser.add_argument("--laps", type=int, default=LAPS, help=f"of each case, at least (default: {LAPS})")
    parser.add_argument("--fresh", type=int, default=FRESH, help=f"processes of each kind and case (default: {FRESH})")
    parser.add_argument("--goal", type=goal, nargs="+", default=[], metavar="ROW=RATIO", help="other goals than 1")
    return parser.parse_args(arguments)


def goal(text: str) -> tuple[str, float]:
    """A row and its goal, as 'new shape=0.5'."""
    row, _, ratio = text.partition("=")
    if row not in ROWS:
        raise argparse.ArgumentTypeError(f"there is no row {row!r}; there are {', '.join(ROWS)}")
    return row, float(ratio)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 when every goal is reached."""
    options = parse(arguments)
    chosen = [name for name in CASES if re.search(options.only, name)]
    if not chosen:
        raise SystemExit(f"--only {options.only}: no case is called so; there are {', '.join(CASES)}")
    goals = dict(options.goal)
    facts = harness.machine((), 1, harness.pin(1))
    print(harness.describe(facts) + "\n")
    start, results, missed = time.perf_counter(), [], []
    with opened({HERE: options.checkout, THERE: options.against}, CHILD) as sides:
        for case in tqdm(chosen, disable=None, unit="case"):
            races = measure(sides, case, options.laps, options.fresh, goals)
            results += [{**race.to_dict(), "verdict": verdict(race, goals)} for race in races.values()]
            missed += [f"{case}: {row}" for row, race in races.items() if verdict(race, goals) not in (REACHED, "")]
            tqdm.write(table(races, goals) + "\n")
    path = harness.save("bench-start", {"machine": facts, "against": str(options.against), "cases": results})
    print(f"raw numbers: {path.relative_to(harness.RESULTS.parents[1])}")
    outcome = f"NOT reached: {', '.join(missed)}" if missed else "all reached"
    print(f"{time.perf_counter() - start:.0f} s; " + (outcome if options.against else "nothing to compare with"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
