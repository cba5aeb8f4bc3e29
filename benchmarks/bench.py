"""Int8 against everyone: torch, torch.ao, torchao, ONNX Runtime, OpenVINO, fbgemm-gpu (`make bench`).

Time and error of every case in one interleaved run per number of threads. Exit status 1 where a goal is not reached;
README.md says how the output is read.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import display
import graph_peers
import harness
import peers
import suite
import torch
from torch import Tensor, nn
from tqdm import tqdm

PACKAGES = ("torchao", "onnxruntime", "onnx", "openvino", "nncf", "fbgemm-gpu-cpu")

FULL = harness.Effort(seconds=5.0, rounds=25, patience=3.0)
QUICK = harness.Effort(seconds=1.0, rounds=7, patience=2.0)

SETTLE = 0.005
"""Seconds before a sample on several threads: the last contender's threads still spin, waiting for work."""

UNDECIDED = 0.03
"""A ratio that is so near its goal gets more rounds."""


INTEGERS = 1e-5
"""A relative error below this is that of float32: a library that was to quantise did not."""


@dataclass(frozen=True)
class Verdict:
    """Of one case.

    Attributes:
        ours: whose time and error count, where we have several.
        rival: the fastest peer.
        ratio: its time over ours.
        bar: the peer whose error is ours to keep: the rival, or the fastest int8 peer where the rival is float.
        failed: what is not reached, in words.
    """

    ours: str
    rival: str
    ratio: harness.Estimate
    bar: str | None
    failed: tuple[str, ...]

    @property
    def text(self) -> str:
        return "NOT reached: " + "; ".join(self.failed) if self.failed else "reached"


def judge(case: suite.Case, race: harness.Race, exact: bool) -> Verdict:
    """The best verdict that one of ours gets.

    Args:
        exact: whether products of full-range int8 do not saturate here, so that ONNX Runtime's default is judged too.
    """
    ours = [name for name in race.seconds if name.startswith("octet")]
    found = [_judge(case, race, name, exact) for name in ours]
    return min(found, key=lambda verdict: (len(verdict.failed), -verdict.ratio.median))


def _judge(case: suite.Case, race: harness.Race, ours: str, exact: bool) -> Verdict:
    rivals = [name for name in race.seconds if not name.startswith("octet") and (exact or name != suite.SATURATES)]
    rivals.sort(key=lambda name: race.time(name).median)
    bar = next((name for name in rivals if name not in suite.FLOAT), None)
    ratio = race.ratio(rivals[0], ours)
    failed = []
    if case.goal is not None and ratio.median < case.goal:
        failed.append(f"{ratio.median:.2f} of {case.goal} against {rivals[0]}")
    # Where the order of additions is all that differs, errors differ in their last digits.
    if case.goal is not None and bar is not None and _error(race, ours) > 1.005 * _error(race, bar):
        failed.append(f"error {_error(race, ours):.4f} above {_error(race, bar):.4f} of {bar}")
    seconds = race.time(ours).median
    if case.limit is not None and seconds > case.limit:
        failed.append(f"{display.duration(seconds)} of {display.duration(case.limit)}")
    return Verdict(ours, rivals[0], ratio, bar, tuple(failed))


def _error(race: harness.Race, name: str) -> float:
    return race.errors[name] or 0.0


def run(
    case: suite.Case, options: argparse.Namespace, exact: bool
) -> tuple[harness.Race, dict[str, str], dict[str, float]]:
    """Measure one case; also who is missing from it, and why, and the seconds that making each contender took.

    Raises:
        peers.Missing: the case's data cannot be had.
    """
    task = case.build()
    building: dict[str, float] = {}
    wanted = {name: _timed(name, maker, building) for name, maker in _wanted(case, task, options, exact).items()}
    found, missing = peers.assemble(task.model, task.probes[0], wanted)
    expected = torch.cat([peers.first(task.model(probe)) for probe in task.probes])
    contenders = []
    for peer in found:
        got = torch.cat([peer.predict(probe) for probe in task.probes])
        error = None if peer is found[0] else harness.relative_error(got, expected)
        if error is not None and error < INTEGERS and peer.name not in suite.FLOAT:
            missing[peer.name] = "it leaves this case in float"
            continue
        contenders.append(harness.Contender(peer.name, peer.call, peer.scope, error))
    race = harness.race(
        case.name,
        contenders,
        effort=QUICK if options.quick else FULL,
        shape=case.shape,
        clock=harness.clock_for(torch.get_num_threads()),
        settle=SETTLE if torch.get_num_threads() > 1 else 0.0,
        undecided=lambda race: (
            case.goal is not None and abs(judge(case, race, exact).ratio.median / case.goal - 1) < UNDECIDED
        ),
    )
    return race, missing, building


def _timed(name: str, maker: peers.Maker, seconds: dict[str, float]) -> peers.Maker:
    """The maker, which notes how long it takes: other people's compilers are most of a run."""

    @functools.wraps(maker)
    def make(model: nn.Module, x: Tensor) -> peers.Peer:
        start = time.perf_counter()
        try:
            return maker(model, x)
        finally:
            seconds[name] = time.perf_counter() - start

    return make


def _wanted(case: suite.Case, task: suite.Task, options: argparse.Namespace, exact: bool) -> dict[str, peers.Maker]:
    made = {}
    for name, maker in case.makers(task).items():
        if name == peers.SEVEN and exact:
            continue
        if name.startswith("octet") or name == "float":
            made[name] = maker
        elif options.ours:
            continue
        elif options.quick and name in suite.COMPILING:
            made[name] = suite.absent("--quick does not wait for compilers")
        else:
            made[name] = graph_peers.foreign(maker)
    return made


def case_table(race: harness.Race, verdict: Verdict) -> str:
    """Everyone's time and error, the fastest first."""
    rows = []
    for name in sorted(race.seconds, key=lambda name: race.time(name).median):
        error = race.errors[name]
        ratio = race.ratio(name, verdict.ours)
        cells = [display.duration(race.time(name).median), "" if error is None else f"{error:.4f}"]
        rows.append([name, *cells, f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"])
    return display.table([race.case, "time", "error", f"time / {verdict.ours}"], rows)


def summary_table(chosen: Sequence[suite.Case], races: dict[str, harness.Race], verdicts: dict[str, Verdict]) -> str:
    """A row for each case: ours, the fastest peer, and whether the goal is reached."""
    rows = []
    for case in chosen:
        if case.name not in races:
            continue
        race, verdict = races[case.name], verdicts[case.name]
        bar = "-" if verdict.bar is None else f"{_error(race, verdict.bar):.4f} {verdict.bar}"
        goal = [text for text in (f"{case.goal}" if case.goal else "", _limit(case)) if text]
        rows.append(
            [case.name, _time_of_ours(race, verdict), f"{_error(race, verdict.ours):.4f}",
             f"{display.duration(race.time(verdict.rival).median)} {verdict.rival}", bar,
             f"{verdict.ratio.median:.2f} [{verdict.ratio.low:.2f}]", " ".join(goal) or "-",
             f"{race.cpu_share:.0%}", verdict.text if goal else "no goal"]
        )  # fmt: skip
    header = ["case", "octet", "error", "fastest peer", "error to keep", "ratio", "goal", "core", "verdict"]
    return display.table(header, rows)


def built(buildings: Mapping[str, Mapping[str, float]]) -> str:
    """How long it took to make the contenders of all cases, those first that took most."""
    total: Counter[str] = Counter()
    for seconds in buildings.values():
        total.update(seconds)
    each = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in total.most_common())
    return f"making the contenders took {sum(total.values()):.0f} s: {each}"


def _time_of_ours(race: harness.Race, verdict: Verdict) -> str:
    """With which of ours it is, where that is not the default one."""
    return f"{display.duration(race.time(verdict.ours).median)} {verdict.ours.removeprefix('octet').strip()}".strip()


def _limit(case: suite.Case) -> str:
    return "" if case.limit is None else f"<= {display.duration(case.limit)}"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="some cases, nobody who compiles: under three minutes")
    parser.add_argument("--ours", action="store_true", help="only float and ours; QUANT_ISA=avx2 shows a lesser CPU")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="several: each in a process of its own")
    parser.add_argument("--section", choices=list(suite.SECTIONS), nargs="+", default=list(suite.SECTIONS))
    parser.add_argument("--only", metavar="REGEX", default="", help="only the cases whose name it finds")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 when every goal is reached."""
    options = parse(arguments)
    if len(options.threads) > 1:
        rest = [f"--{flag}" for flag in ("quick", "ours") if getattr(options, flag)]
        return harness.in_children(options.threads, [*rest, "--only", options.only, "--section", *options.section])
    facts = harness.machine(PACKAGES, options.threads[0], harness.pin(options.threads[0]))
    print(harness.describe(facts) + "\n")
    with torch.no_grad():
        return _measure(options, facts)


def _measure(options: argparse.Namespace, facts: dict[str, Any]) -> int:
    every = [case for name in options.section for case in suite.SECTIONS[name]()]
    chosen = [case for case in every if re.search(options.only, case.name) and (case.quick or not options.quick)]
    if not chosen:
        raise SystemExit(f"--only {options.only}: no case is called so; there are {', '.join(c.name for c in every)}")
    exact = facts["architecture"] not in ("x86_64", "AMD64") or any("vnni" in flag for flag in facts["isa"])
    races: dict[str, harness.Race] = {}
    verdicts: dict[str, Verdict] = {}
    absences: dict[str, dict[str, str]] = {}
    buildings: dict[str, dict[str, float]] = {}
    start = time.perf_counter()
    bar = tqdm(chosen, disable=None, unit="case")
    for case in bar:
        bar.set_postfix_str(case.name)
        try:
            races[case.name], absences[case.name], buildings[case.name] = run(case, options, exact)
        except peers.Missing as reason:
            absences[case.name] = {case.name: str(reason)}
            continue
        verdicts[case.name] = judge(case, races[case.name], exact)
        tqdm.write(case_table(races[case.name], verdicts[case.name]) + "\n")
    if options.ours:
        chosen = [dataclasses.replace(case, goal=None, limit=None) for case in chosen]
    print(summary_table(chosen, races, verdicts))
    for line in display.absent_lines(absences):
        print(line)
    failed = [name for name in absences if name not in races or (not options.ours and verdicts[name].failed)]
    _keep(options, facts, races, verdicts, absences, buildings)
    print(built(buildings))
    outcome = f"NOT reached: {', '.join(failed)}" if failed else "all reached"
    print(f"{time.perf_counter() - start:.0f} s; " + ("--ours: no goal is judged" if options.ours else outcome))
    return 1 if failed else 0


def _keep(
    options: argparse.Namespace,
    facts: dict[str, Any],
    races: dict[str, harness.Race],
    verdicts: dict[str, Verdict],
    absences: dict[str, dict[str, str]],
    buildings: Mapping[str, Mapping[str, float]],
) -> None:
    """Raw numbers and a picture."""
    cases = [
        {**race.to_dict(), "verdict": verdicts[name].text, "absent": absences[name], "building": buildings[name]}
        for name, race in races.items()
    ]
    content = {"machine": facts, "quick": options.quick, "cases": cases}
    name = f"bench-{facts['threads']}-threads"
    path = harness.save(name, content)
    print(f"\nraw numbers: {path.relative_to(harness.RESULTS.parents[1])}")
    values = {name: verdict.ratio.median for name, verdict in verdicts.items()}
    title = f"time of the fastest peer / ours, {facts['threads']} thread(s)"
    print(display.show(values, title, path.with_suffix(".png")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
