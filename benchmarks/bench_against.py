"""Whether a row of `make bench` became slower, or less exact, than in another checkout (`make bench-against`).

    python benchmarks/bench_against.py ../older                 # its kernels built; every row, one thread
    python benchmarks/bench_against.py ../older --threads 1 2 --only 'LSTM|GRU'

Each checkout has a process of its own that is asked for one lap of a case at a time, in turns; a few processes one
after the other, because where a process happens to lie in memory makes a small layer a tenth slower or faster for as
long as it lives. Exit status 1 where a row is slower beyond what two runs of one checkout differ by, or errs more;
README.md says how the output is read.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import display
import harness
import suite
from sides import HERE, REACHED, ROOT, THERE, Side, checkout, compared, opened, turn
from tqdm import tqdm

CHILD = Path(__file__).with_name("row_child.py")

LAPS = 3
"""Of each case in each process; each is the median of a few samples of milliseconds."""
PROCESSES = 7
"""Of each side. One gives one figure of a case: the median of its laps."""
ERROR = 1.005
"""Where the order of additions is all that differs, errors differ in their last digits."""

Measured = tuple[harness.Race, dict[str, float]]
"""Seconds by side, a figure for each process, and the errors."""


def measure(sides: Sequence[Side], case: str, laps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of one case on each side, the median of laps in turns, each round begun by another; also the errors."""
    errors = {side.name: side.lap(case)["error"] for side in sides}  # the first lap builds, packs and warms up
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for done in range(laps):
        for side in turn(sides, done):
            seconds[side.name].append(side.lap(case)["seconds"])
    return {name: statistics.median(times) for name, times in seconds.items()}, errors


def measure_all(options: argparse.Namespace, chosen: Sequence[str], threads: int) -> dict[str, Measured]:
    """Every case in each of the processes that each side has, one after the other."""
    checkouts = {HERE: ROOT, THERE: options.against}
    measured = {case: (harness.Race(case, {}), dict[str, float]()) for case in chosen}
    with tqdm(total=options.processes * len(chosen), disable=None, unit="case") as progress:
        for done in range(options.processes):
            with opened(checkouts, CHILD, threads) as sides:
                for case in chosen:
                    seconds, errors = measure(turn(sides, done), case, options.laps)
                    for name, value in seconds.items():
                        measured[case][0].seconds.setdefault(name, []).append(value)
                    measured[case][1].update(errors)
                    progress.update()
    return measured


def verdict(race: harness.Race, errors: dict[str, float]) -> str:
    """Of one row, in words."""
    if errors[HERE] > ERROR * errors[THERE]:
        return f"NOT reached: error {errors[HERE]:.4f} above {errors[THERE]:.4f}"
    return compared(race, 1.0)


def cells(race: harness.Race, errors: dict[str, float]) -> list[str]:
    """A row of the table."""
    ratio = race.ratio(HERE, THERE)
    times = [f"{display.duration(race.time(name).median)} ({errors[name]:.4f})" for name in (HERE, THERE)]
    return [race.case, *times, f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]", verdict(race, errors)]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("against", type=checkout, metavar="CHECKOUT", help="another checkout, its kernels built")
    parser.add_argument("--only", metavar="REGEX", default="", help="only the cases whose name it finds")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="several: each in a process of its own")
    parser.add_argument("--laps", type=int, default=LAPS, help=f"of a case in a process (default: {LAPS})")
    parser.add_argument("--processes", type=int, default=PROCESSES, help=f"of each side (default: {PROCESSES})")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 when nothing is slower."""
    options = parse(arguments)
    every = [case.name for section in suite.SECTIONS.values() for case in section()]
    chosen = [name for name in every if re.search(options.only, name)]
    if not chosen:
        raise SystemExit(f"--only {options.only}: no case is called so; there are {', '.join(every)}")
    return max(run(options, chosen, threads) for threads in options.threads)


def run(options: argparse.Namespace, chosen: Sequence[str], threads: int) -> int:
    """The cases on so many threads, which the children compute on; 0 when nothing is slower."""
    facts = harness.machine((), threads)
    print(harness.describe(facts) + "\n")
    start, rows, results = time.perf_counter(), [], []
    for race, errors in measure_all(options, chosen, threads).values():
        rows.append(cells(race, errors))
        results.append({**race.to_dict(), "errors": errors, "verdict": rows[-1][-1]})
    print(display.table(["case", "here (error)", "there", f"{HERE} / {THERE}", "verdict"], rows))
    path = harness.save(
        f"bench-against-{threads}-threads", {"machine": facts, "against": str(options.against), "cases": results}
    )
    print(f"\nraw numbers: {path.relative_to(harness.RESULTS.parents[1])}")
    missed = [row[0] for row in rows if row[-1] != REACHED]
    outcome = f"NOT reached: {', '.join(missed)}" if missed else "nothing is slower"
    print(f"{time.perf_counter() - start:.0f} s; {outcome}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
