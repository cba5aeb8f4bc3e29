"""Every architecture of the zoo: float eager, float compiled and int8, time and error (`make bench-zoo`).

    python benchmarks/bench_zoo.py                               # float eager and int8
    python benchmarks/bench_zoo.py --compiled --only 'timm_|tv_' # torch.compile as well: minutes a row
    python benchmarks/bench_zoo.py --results FILE                # rows that FILE holds already are kept
    python benchmarks/bench_zoo.py --results FILE --minutes 10   # the same in slices: call it until no row is left

A row is timed in a process of its own, its contenders in turns. The rows are kept as lines of JSON, each with its
commit, and the table beside them is written anew with every row. Exit status 1 where a goal is not reached or a row is
left; README.md says how it is read.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import re
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is trained, so nothing is to be fetched
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # where `zoo` is a package

import display
import harness
import torch
from torch import nn
from tqdm import tqdm
from zoo.catalogue import CATALOGUE
from zoo.entry import Batch, Entry
from zoo.measure import CALIBRATION_BATCHES
from zoo.rows import Key, Limits, Row, computable, compute, kept
from zoo.trees import difference, likeness, matched_boxes, tensors_of

import quant
from quant.runtime.callee import Submodule
from quant.runtime.instructions import FloatCall, Instruction
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.region import Region

FLOAT, COMPILED, OURS = "float", "compiled", "octet"
EAGER_MODE, COMPILED_MODE = "eager", "compiled"

NOISE = 0.03
"""A ratio this much below 1 is no difference: two runs of one model differ by so much."""
MEDIAN_GOALS = {FLOAT: 2.5, COMPILED: 1.5}
"""Least median over all rows of a contender's time over ours."""

CLOCK = time.thread_time
"""All contenders compute on this one thread. The process's time is no clock here: Linux counts it in ticks of
milliseconds for a process whose CPU time has a limit, as that of a row has."""

EFFORT = harness.Effort(seconds=1.5, rounds=7, patience=4.0)
TIME_LIMIT = {EAGER_MODE: 300, COMPILED_MODE: 900}
"""Seconds of CPU time of a row; Inductor compiles for minutes."""


def measure(entry: Entry, mode: str, batch_size: int | None = None, effort: harness.Effort = EFFORT) -> Row:
    """The row of an architecture; what is raised on the way is its verdict.

    Args:
        mode: `EAGER_MODE` or `COMPILED_MODE`.
        batch_size: samples of the batch that is timed; None for as many as calibration has.
    """
    row: Row = {"name": entry.name, "mode": mode}
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            _measure(entry, row, batch_size or entry.size, effort)
    except Exception as error:
        text = next(iter(str(error).splitlines()), "")
        row["verdict"], row["traceback"] = f"fails: {type(error).__name__}: {text[:200]}", traceback.format_exc()
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def _measure(entry: Entry, row: Row, batch_size: int, effort: harness.Effort) -> None:
    with torch.inference_mode(False):
        model = entry.build()
        batches = [entry.draw(place, entry.size) for place in range(CALIBRATION_BATCHES)]
        q = quant.quantize_static(model, copy.deepcopy(batches), forward=entry.call, progress=False)
    batch = entry.draw(300, batch_size)
    expected, found = entry.run(model, batch), entry.run(q, batch)
    row.update(batch=batch_size, **agreement(entry, expected, found), **anatomy(q))
    if row.get("verdict"):
        return
    calls = {FLOAT: caller(entry, model, batch), OURS: caller(entry, q, batch)}
    if row["mode"] == COMPILED_MODE:
        try:
            calls[COMPILED] = caller(entry, compiled(entry, model, batch), batch)
        except Exception as error:
            row["absent"] = f"{COMPILED}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
    contenders = [harness.Contender(name, call) for name, call in calls.items()]
    race = harness.race(entry.name, contenders, effort=effort, undecided=undecided, clock=CLOCK)
    row["times"] = {name: race.time(name).median for name in calls}
    ratios = {name: race.ratio(name, OURS) for name in calls if name != OURS}
    row["ratios"] = {name: [one.median, one.low, one.high] for name, one in ratios.items()}
    row["verdict"] = verdict(ratios[FLOAT])


def undecided(race: harness.Race) -> bool:
    """Whether the interval has the limit of `verdict` in it."""
    ratio = race.ratio(FLOAT, OURS)
    return ratio.low < 1 - NOISE < ratio.high


def verdict(ratio: harness.Estimate) -> str:
    """'SLOWER' where the whole interval of float's time over ours is below 1 by more than noise."""
    return "SLOWER" if ratio.high < 1 - NOISE else "ok"


def agreement(entry: Entry, expected: Any, found: Any) -> dict[str, Any]:
    """The error of the first output, as SQNR in dB or, of a detector, as overlap; a verdict where types differ."""
    problem = difference(expected, found, lengths=not entry.detects)
    if problem:
        return {"verdict": f"wrong: {problem}"}
    if entry.detects:
        return {"overlap": round(matched_boxes(expected, found), 3)}
    return {"db": round(likeness(expected, found).first, 1)}


def caller(entry: Entry, model: nn.Module, batch: Batch) -> Callable[[], object]:
    """A call with the batch; with a new copy each time where the model writes into its inputs."""
    one = copy.deepcopy(batch)
    entry.call(model, one)
    before, after = tensors_of(batch), tensors_of(one)
    same = before.keys() == after.keys() and all(_equal(before[name], after[name]) for name in before)
    return (lambda: entry.call(model, batch)) if same else (lambda: entry.run(model, batch))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


def compiled(entry: Entry, model: nn.Module, batch: Batch) -> nn.Module:
    """The float model through torch.compile for the batch's shapes, its weights laid out beforehand (freezing)."""
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(freezing=True, compile_threads=1):
        call = torch.compile(copy.deepcopy(model), dynamic=False)
        entry.run(call, batch)
    return call  # type: ignore[return-value]


def anatomy(q: nn.Module) -> dict[str, Any]:
    """What a call of the model is made of, by the first program of each captured module.

    Returns:
        "native": instructions of each native call. "single": instructions that run by themselves, counted by what they
        call. "islands": modules that run as they are. "float": layers with weights in float.
    """
    native: list[int] = []
    single: Counter[str] = Counter()
    for name, module in q.named_modules():
        if not isinstance(module, ProgramRunner) or ".others." in f".{name}":
            continue
        schedule = module.program.schedule
        for step in module.program.instructions if schedule is None else schedule.steps:
            if isinstance(step, Region):
                native.append(step.steps)
            else:
                single[_called(step, module.root)] += 1
    report = quant.summary(q)
    return {
        "native": native,
        "single": dict(single.most_common()),
        "islands": [entry.name or "(root)" for entry in report if "an island" in entry.detail],
        "float": [entry.name for entry in report if entry.outcome == "float" and entry.bytes_before],
    }


def _called(instruction: Instruction, root: nn.Module) -> str:
    """What an instruction calls: a function's name, a module's class, or its own kind."""
    if not isinstance(instruction, FloatCall):
        return type(instruction).__name__
    callee = instruction.callee
    if isinstance(callee, Submodule):
        return type(root.get_submodule(callee.path)).__name__
    return callee.name


def of_commit(rows: Mapping[Key, Row], commit: str | None) -> dict[Key, Row]:
    """The rows that were measured at a commit."""
    return {key: row for key, row in rows.items() if row.get("commit") == commit}


def commits(rows: Sequence[Row]) -> str:
    """How many rows were measured at which commit, where there are several; else ''."""
    counts = Counter(str(row.get("commit") or "unknown") for row in rows)
    return ", ".join(f"{count} at {commit}" for commit, count in counts.most_common()) if len(counts) > 1 else ""


HEADER = ("model", "batch", "float", "octet", "float / octet", "compiled / octet", "dB", "native", "single", "verdict")


def table(rows: Sequence[Row]) -> str:
    """The slowest rows first; then what is said of those that are slower than float or have no figures."""
    timed = sorted((row for row in rows if "ratios" in row), key=lambda row: row["ratios"][FLOAT][0])
    others = [row for row in rows if "ratios" not in row]
    lines = [display.table(HEADER, [_cells(row) for row in timed])]
    lines += [f"{row['name']}: {row['verdict']}" for row in others]
    lines += [f"{row['name']}: absent: {row['absent']}" for row in timed if "absent" in row]
    lines += [_described(row) for row in timed if row["ratios"][FLOAT][0] < 1]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    times, error = row["times"], row.get("db", row.get("overlap", ""))
    native, single = row["native"], sum(row["single"].values())
    return [
        row["name"],
        str(row["batch"]),
        display.duration(times[FLOAT]),
        display.duration(times[OURS]),
        _interval(row["ratios"][FLOAT]),
        _interval(row["ratios"][COMPILED]) if COMPILED in row["ratios"] else "",
        str(error),
        str(len(native)),
        str(single) + (f" + {len(row['islands'])} islands" if row["islands"] else ""),
        row["verdict"],
    ]


def _interval(ratio: Sequence[float]) -> str:
    median, low, high = ratio
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def _described(row: Row) -> str:
    """What a call of a row's model is made of."""
    parts = [f"native calls of {' + '.join(map(str, row['native']))} steps" if row["native"] else "no native call"]
    parts.append("single: " + ", ".join(f"{count} {name}" for name, count in row["single"].items()))
    parts += [
        f"{title}: {', '.join(row[key])}"
        for title, key in (("islands", "islands"), ("float layers", "float"))
        if row[key]
    ]
    return f"{row['name']}: " + "; ".join(parts)


def missed(rows: Sequence[Row]) -> list[str]:
    """The goals that are not reached: rows slower than float or without figures, and medians."""
    misses = [f"{row['name']}: {row['verdict']}" for row in rows if row["verdict"] != "ok"]
    return misses + [
        f"median against {name}: {median:.2f} of {goal}"
        for name, (median, goal) in medians(rows).items()
        if median < goal
    ]


def medians(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """For each contender, the median of its time over ours, and the goal."""
    values = {name: [row["ratios"][name][0] for row in rows if name in row.get("ratios", {})] for name in MEDIAN_GOALS}
    return {name: (statistics.median(values[name]), goal) for name, goal in MEDIAN_GOALS.items() if values[name]}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", default="", help="only architectures whose name it is found in")
    parser.add_argument("--compiled", action="store_true", help="float through torch.compile as well")
    parser.add_argument("--batch", type=int, metavar="N", help="samples to time (default: the catalogue's, mostly 4)")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time, each on one thread")
    parser.add_argument(
        "--results", type=Path, default=harness.RESULTS / "zoo.jsonl", help="rows in it are not done again"
    )
    parser.add_argument("--again", action="store_true", help="begin anew, without the rows that are there")
    parser.add_argument("--this-commit", action="store_true", help="do rows again that another commit has measured")
    parser.add_argument(
        "--minutes", type=float, metavar="N", default=math.inf, help="begin no row after N minutes: a slice of the run"
    )
    parser.add_argument("--time-limit", type=int, metavar="SECONDS", help="of CPU time, for one row")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 when every goal is reached."""
    options = parse(arguments)
    mode = COMPILED_MODE if options.compiled else EAGER_MODE
    wanted = [(name, mode) for name in CATALOGUE if re.search(options.only, name)]
    if not wanted:
        raise SystemExit(f"--only {options.only}: no architecture's name matches")
    if options.again:
        options.results.unlink(missing_ok=True)
    facts = harness.machine((), 1)
    rows = kept(options.results)
    if options.this_commit:
        rows = of_commit(rows, facts["commit"])
    todo = computable([key for key in wanted if key not in rows])
    described = harness.describe(facts)
    print(described + "\n")
    beside = options.results.with_suffix(".txt")

    def measured(key: Key) -> Row:
        return {**measure(CATALOGUE[key[0]], key[1], options.batch), "commit": facts["commit"]}

    def note(row: Row) -> None:
        rows[row["name"], row["mode"]] = row
        beside.write_text(f"{described}\n\n{table(shown())}\n", encoding="utf-8")
        if row["verdict"] != "ok":
            tqdm.write(f"{row['name']}: {row['verdict'][:160]}", file=sys.stderr)

    def shown() -> list[Row]:
        return [rows[key] for key in wanted if key in rows]

    limits = Limits(options.time_limit or TIME_LIMIT[mode], options.jobs, options.minutes)
    compute(todo, measured, options.results, limits, note)
    print(table(shown()))
    if commits(shown()):
        print(f"rows of several commits: {commits(shown())}; --this-commit does the others again")
    for name, (median, goal) in medians(shown()).items():
        print(f"median of {name} / {OURS}: {median:.2f}, at least {goal} wanted")
    misses = missed(shown())
    left = sum(key not in rows for key in todo)
    if left:
        print(f"{left} rows are left: the same command goes on, without --again")
    print(
        f"rows: {options.results}; NOT reached: {len(misses)} goals"
        if misses
        else f"rows: {options.results}; all reached"
    )
    return 1 if misses or left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
