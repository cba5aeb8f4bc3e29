"""Dynamic int8 against torch.ao, ONNX Runtime and float: time and error, in one interleaved run (`make bench-dynamic`).

Exit status 1 when a row is not "ok"; README.md says how the table is read.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import display
import eight_decades
import harness
import peers
import torch
from torch import nn
from tqdm import tqdm

OURS = "octet"

RECURRENT_ERROR = 0.015
"""Most relative output error of an LSTM or GRU with random weights."""

SMALL_LINEAR_SECONDS = 6e-6
"""Most time for a 1x64x64 linear, called from Python."""

STEPS, LAYERS = 35, 2

CROWDED = 0.9
"""A share of the core below this means that another process ran on it for a good part of the time."""

LEGEND = f"""
time: median of one call, with the relative output error against float; LSTM and GRU have {STEPS} steps, {LAYERS} layers
ratio: their time / ours in the same round, median over rounds [lower end of its {harness.CONFIDENCE:.0%} interval]
ok: that lower end is at least 1 against float and torch.ao, and error and time are within the limits
core: the share of the wall time for which this process had its core; at one thread the rest is not counted"""

FULL = harness.Effort(seconds=2.5, rounds=15, patience=4.0)
QUICK = harness.Effort(seconds=0.3, rounds=5, patience=8.0)


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: as the table shows it.
        shape: recorded with the result.
        build: the float model.
        input_shape: of its input.
        error_limit: most relative error of ours, or None.
        time_limit: most seconds of ours, or None.
    """

    name: str
    shape: dict[str, Any]
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    error_limit: float | None = None
    time_limit: float | None = None


def cases() -> Iterator[Case]:
    """Every row, recurrent ones first."""
    for kind in (nn.LSTM, nn.GRU):
        for hidden in (512, 1024):
            for batch in (1, 16):
                yield Case(
                    f"{kind.__name__} H{hidden} B{batch}",
                    {"kind": kind.__name__, "steps": STEPS, "layers": LAYERS, "hidden": hidden, "batch": batch},
                    lambda kind=kind, hidden=hidden: kind(hidden, hidden, LAYERS),  # type: ignore[misc]
                    (STEPS, batch, hidden),
                    error_limit=RECURRENT_ERROR,
                )
    squares = [(width, width) for width in (64, 256, 512, 768, 1024, 3072)]
    for inputs, outputs in [*squares, (768, 3072), (3072, 768)]:
        for rows in (1, 16, 128):
            yield Case(
                f"Linear {rows}x{inputs}x{outputs}",
                {"kind": "Linear", "rows": rows, "in_features": inputs, "out_features": outputs},
                lambda inputs=inputs, outputs=outputs: nn.Linear(inputs, outputs),  # type: ignore[misc]
                (rows, inputs),
                time_limit=SMALL_LINEAR_SECONDS if (rows, inputs, outputs) == (1, 64, 64) else None,
            )


def rivals(race: harness.Race) -> list[str]:
    """Whom we must never be slower than: float, and torch.ao on any engine."""
    return [name for name in race.seconds if name == "float" or name.startswith("ao ")]


def verdict(case: Case, race: harness.Race) -> str:
    """ "ok", or what is wrong.

    Not slower than a rival is shown when the lower end of the interval of (its time / ours) reaches 1. SLOWER: the
    upper end does not either. unsure: 1 lies between them, after all the time that the case may take.
    """
    ratios = {name: race.ratio(name, OURS) for name in rivals(race)}
    wrong = [f"SLOWER than {name}" for name, ratio in ratios.items() if ratio.high < 1]
    wrong += [f"unsure: {name}" for name, ratio in ratios.items() if ratio.low < 1 <= ratio.high]
    error = race.errors[OURS]
    if case.error_limit is not None and (error is None or error > case.error_limit):
        wrong.append(f"ERROR above {case.error_limit}")
    if case.time_limit is not None and race.time(OURS).median > case.time_limit:
        wrong.append(f"ABOVE {display.duration(case.time_limit)}")
    return "; ".join(wrong) or "ok"


def run(case: Case, wanted: dict[str, peers.Maker], effort: harness.Effort) -> tuple[harness.Race, dict[str, str]]:
    """Measure one case; also who is missing from it, and why."""
    torch.manual_seed(0)
    model, x = case.build().eval(), torch.randn(case.input_shape)
    found, missing = peers.assemble(model, x, wanted)
    expected = found[0].predict(x)
    contenders = [
        harness.Contender(
            peer.name,
            peer.call,
            peer.scope,
            None if peer is found[0] else harness.relative_error(peer.predict(x), expected),
        )
        for peer in found
    ]
    race = harness.race(
        case.name,
        contenders,
        effort=effort,
        clock=harness.clock_for(torch.get_num_threads()),
        shape=case.shape,
        undecided=lambda race: "unsure" in verdict(case, race),
    )
    return race, missing


def time_table(races: dict[str, harness.Race], verdicts: dict[str, str], names: Sequence[str]) -> str:
    """A row for each case: of each contender the median time and the error, then the ratios to ours."""
    against = [name for name in names if name != OURS]
    header = ["case", *names, *(f"{name}/{OURS}" for name in against), "core", "verdict"]
    rows = []
    for case, race in races.items():
        times = [_time_cell(race, name) for name in names]
        ratios = [_ratio_cell(race, name) for name in against]
        rows.append([case, *times, *ratios, f"{race.cpu_share:.0%}", verdicts[case]])
    return display.table(header, rows)


def _time_cell(race: harness.Race, name: str) -> str:
    if name not in race.seconds:
        return "-"
    error = race.errors[name]
    return display.duration(race.time(name).median) + ("" if error is None else f" {error:.4f}")


def _ratio_cell(race: harness.Race, name: str) -> str:
    if name not in race.seconds:
        return "-"
    ratio = race.ratio(name, OURS)
    return f"{ratio.median:.2f} [{ratio.low:.2f}]"


def decades_table(kept: list[eight_decades.Kept], names: Sequence[str]) -> tuple[str, list[str]]:
    """The cosines, and the networks where ours is below the limit."""
    rows, lost = [], []
    for row in kept:
        reached = row.cosines[OURS] >= eight_decades.COSINE_LIMIT
        if not reached:
            lost.append(row.network)
        cells = [f"{row.cosines[name]:.4f}" if name in row.cosines else "-" for name in names]
        rows.append([row.network, *cells, "ok" if reached else f"BELOW {eight_decades.COSINE_LIMIT}"])
    return display.table(["cosine to float", *names, "verdict"], rows), lost


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute, with wider intervals")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="several: each in a process of its own")
    parser.add_argument("--backends", action="store_true", help="also every backend of ours by itself")
    parser.add_argument("--only", metavar="REGEX", help="only the cases whose name it finds")
    parser.add_argument("--json", action="store_true", help="print the raw numbers instead of the table")
    parser.add_argument("--plot", action="store_true", help="also a chart of the ratios")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 when every row is ok."""
    options = parse(arguments)
    if len(options.threads) > 1:
        rest = [f"--{flag}" for flag in ("quick", "backends", "json", "plot") if getattr(options, flag)]
        return harness.in_children(options.threads, [*rest, *(["--only", options.only] if options.only else [])])
    threads: int = options.threads[0]
    facts = harness.machine(["fbgemm-gpu-cpu", "onnxruntime", "onnx"], threads, harness.pin(threads))
    say = (lambda text: None) if options.json else print
    say(harness.describe(facts) + "\n")
    with torch.inference_mode():
        return _measure(options, facts, say)


def _measure(options: argparse.Namespace, facts: dict[str, Any], say: Callable[[str], None]) -> int:
    wanted = peers.makers(options.backends)
    chosen = [case for case in cases() if re.search(options.only or "", case.name)]
    if not chosen:
        raise SystemExit(f"--only {options.only}: no case is called so; there are {', '.join(c.name for c in cases())}")
    races: dict[str, harness.Race] = {}
    verdicts: dict[str, str] = {}
    absences: dict[str, dict[str, str]] = {}
    bar = tqdm(chosen, disable=None, unit="case")
    for case in bar:
        bar.set_postfix_str(case.name)
        races[case.name], absences[case.name] = run(case, wanted, QUICK if options.quick else FULL)
        verdicts[case.name] = verdict(case, races[case.name])
    names = [name for name in wanted if any(name in race.seconds for race in races.values())]
    failed = [case for case, text in verdicts.items() if text != "ok"]
    say(time_table(races, verdicts, names))
    say(LEGEND)
    if facts["threads"] > 1 and min(race.cpu_share for race in races.values()) < CROWDED:
        say("NOTE: others wanted the CPUs. Threads that wait for each other then measure the others: repeat when idle")
    for line in display.absent_lines(absences):
        say(line)
    kept: list[eight_decades.Kept] = []
    if not options.only:
        kept = eight_decades.measure(wanted)
        text, lost = decades_table(kept, [name for name in wanted if name != "float"])
        failed += lost
        say(f"\nLSTM on features that span {eight_decades.DECADES} decades\n{text}")
    content = {
        "machine": facts,
        "quick": options.quick,
        "cases": [
            {**race.to_dict(), "verdict": verdicts[case], "absent": absences[case]} for case, race in races.items()
        ],
        "eight_decades": [asdict(row) for row in kept],
    }
    path = harness.save("bench_dynamic", content)
    say(f"\nraw numbers: {path.relative_to(harness.RESULTS.parents[1])}")
    if options.plot:
        longer = {case: min(race.ratio(name, OURS).median for name in rivals(race)) for case, race in races.items()}
        title = f"time of the fastest of float and torch.ao / ours, {facts['threads']} thread(s)"
        say(display.show(longer, title, harness.RESULTS / "bench_dynamic.png"))
    if options.json:
        print(json.dumps(content))
    say(f"NOT ok: {', '.join(failed)}" if failed else "every row is ok")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
