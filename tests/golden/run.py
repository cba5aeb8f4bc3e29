"""Whether converted models give the same bytes as with another version of this package. `make golden ARGS=...`

    python tests/golden/run.py --against ../older        # a checkout with its kernels built: both sides, compared
    python tests/golden/run.py --write FILE              # this side alone, into a small file; --checkout for another
    python tests/golden/run.py --check FILE              # this side against that file, on the same machine
    python tests/golden/run.py --against ../older --suite --results FILE    # models that the tests convert, or load
    python tests/golden/run.py --against ../older --suite tests/quant/test_convert.py

3,000 networks are drawn from their numbers (networks.py), made int8 by the public functions and run on fixed inputs, on
one thread; what is kept of each is a hash of all its outputs' bytes. Where float32 parts of a network round by the
machine (torch's own kernels do), so do the hashes: a file holds for one machine. Of networks that differ, the first are
run again on both sides, and the largest difference is shown with the ratio of signal to difference.

With --suite each side runs its own tests, and every model that a test of both converts or loads is hashed instead
(suite.py). A run that was stopped goes on from its --results. Differences that were decided are those of
differences.py: the exit status is 0 where each one has its reason there, and where each of those was met.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import NamedTuple, TypeAlias

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests/, where `golden` is a package

import torch
from architecture.sources import link
from golden.differences import Difference, headings, judge
from golden.networks import functions_called
from golden.suite import TESTS, compare_suites
from safetensors.torch import load_file
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
SHARES = {
    "operators": 0.36,
    "blocks": 0.36,
    "recurrent": 0.08,
    "dynamic": 0.1,
    "trained": 0.07,
    "trained-recurrent": 0.03,
}
"""Kind of networks, of networks.py -> its share of all."""

LOG = "errors.txt"
"""In the folder of the links: what the last child wrote about the networks that ended with an error."""

Line: TypeAlias = list[str] | dict[str, str] | RuntimeError | None
"""A network and its result; versions; why a child could not begin; the end of one."""

SHOWN = 10
"""Networks that differ, of which values are shown."""


@dataclass
class Side:
    """What one version of the package gives.

    Attributes:
        commit: of the checkout, with "+" where files are changed.
        versions: of torch and others, as the child said.
        results: per network the hash of its outputs, or the name of the error that it ended with.
        decisions: that the version follows, by their headings in docs/decisions.md.
    """

    commit: str
    versions: dict[str, str] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)


def main() -> int:
    options = parsed()
    if options.suite is not None:
        return compare_suites(options.checkout.resolve(), options.against.resolve(), options.suite, options.results)
    names = [name for name in drawn(options.count) if re.search(options.only, name)]
    here = run(options.checkout, names, options.jobs)
    print(f"{len(names)} networks, {summary(here)}")
    if options.write:
        options.write.write_text(json.dumps(here.__dict__, indent=0) + "\n")
        return 0
    if options.check:
        other, values = Side(**json.loads(options.check.read_text())), None
    else:
        other, values = run(options.against, names, options.jobs), options.against
        print(f"the other side: {summary(other)}")
    return report(here, other, names, values and (options.checkout, values))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, its kernels built")
    what.add_argument("--write", type=Path, metavar="FILE", help="write this side's hashes")
    what.add_argument("--check", type=Path, metavar="FILE", help="compare this side with a file of --write")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="of this side (default: the one of this file)")
    parser.add_argument("--count", type=int, default=3000, help="networks (default: 3000)")
    parser.add_argument("--only", default="", metavar="REGEX", help="names of networks, as 'recurrent-1[0-9]$'")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    parser.add_argument(
        "--suite", nargs="*", metavar="FILE", help=f"models of the tests; of all files in {', '.join(TESTS)} if none"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="keeps what the files of --suite gave")
    options = parser.parse_args()
    if options.suite is not None and not options.against:
        parser.error("--suite goes with --against")
    return options


def drawn(count: int) -> list[str]:
    return [f"{kind}-{seed}" for kind, share in SHARES.items() for seed in range(round(count * share))]


def run(checkout: Path, names: list[str], jobs: int, keep: Path | None = None) -> Side:
    """Convert and run the networks with the package of a checkout; interrupted, those that are done count."""
    side = Side(commit_of(checkout), decisions=headings(checkout))
    with tempfile.TemporaryDirectory() as folder:
        link(checkout, Path(folder))
        lines: Queue[Line] = Queue()
        threads = [
            threading.Thread(target=converse, args=(Path(folder), names[start::jobs], keep, lines), daemon=True)
            for start in range(jobs)
        ]
        for one in threads:
            one.start()
        with tqdm(total=len(names), desc=side.commit, disable=None) as bar, contextlib.suppress(KeyboardInterrupt):
            waiting = jobs
            while waiting:
                line = lines.get()
                if line is None:
                    waiting -= 1
                elif isinstance(line, RuntimeError):
                    raise line
                elif isinstance(line, dict):
                    side.versions = line
                else:
                    side.results[line[0]] = line[1]
                    bar.update()
    side.results = {name: side.results[name] for name in names if name in side.results}
    return side


def converse(site: Path, names: list[str], keep: Path | None, lines: Queue[Line]) -> None:
    """Put what a child says into `lines`, then None. A network at which it dies is a result, and another goes on."""
    while names:
        said = list[Line]()
        for line in child(site, names, keep):
            said.append(line)
            lines.put(line)
        done = sum(isinstance(line, list) for line in said)
        if not said:
            lines.put(RuntimeError(f"the package cannot be used: {(site / LOG).read_text()[-2000:]}"))
        elif done < len(names):
            lines.put([names[done], "the process died"])
        names = names[done + 1 :] if said else []
    lines.put(None)


def child(site: Path, names: list[str], keep: Path | None) -> Iterator[list[str] | dict[str, str]]:
    command = [sys.executable, str(Path(__file__).with_name("child.py")), str(keep or ""), *names]
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    log = (site / LOG).open("w")
    with log, subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)


def commit_of(checkout: Path) -> str:
    git = ["git", "-C", str(checkout)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout
    return (commit or checkout.resolve().name) + ("+" if changed else "")


def summary(side: Side) -> str:
    ends = Counter(result if " " in result else "int8" for result in side.results.values())
    return f"commit {side.commit}: " + ", ".join(f"{count} {end}" for end, count in ends.most_common())


def report(here: Side, other: Side, names: list[str], checkouts: tuple[Path, Path] | None) -> int:
    """Print what differs; 1 where anything does without a reason, 2 where the two cannot be compared."""
    unlike = {key for key in here.versions if key != "octet" and here.versions[key] != other.versions.get(key)}
    if unlike:
        for key in sorted(unlike):
            print(f"{key}: {here.versions[key]} here, {other.versions.get(key)} there", file=sys.stderr)
        print("the two sides cannot be compared", file=sys.stderr)
        return 2
    both = [name for name in names if name in here.results and name in other.results]
    differing = [name for name in both if here.results[name] != other.results[name]]
    kinds = Counter(name.rsplit("-", 1)[0] for name in both)
    worse = Counter(name.rsplit("-", 1)[0] for name in differing)
    for kind, count in kinds.items():
        print(f"{kind:20}{count - worse[kind]:6} of {count:5} equal")
    print(f"{'all':20}{len(both) - len(differing):6} of {len(both):5} equal")
    measured = functools.cache(functools.partial(difference, checkouts=checkouts))
    for name in differing[:SHOWN]:
        print(f"{name}: {measured(name).text}")
    if len(differing) > SHOWN:
        print(f"and {len(differing) - SHOWN} more: {' '.join(differing[SHOWN:])}")

    def follows(name: str, decided: Difference) -> bool:
        return bool(decided.calls & functions_called(name)) and measured(name).ratio >= decided.ratio

    verdict = judge(differing, here.decisions, other.decisions, both.__contains__, follows)
    verdict.show()
    print(f"{len(both) - len(differing)} networks equal, {verdict.summary()}")
    return 1 if verdict.failed or not both else 0


class Distance(NamedTuple):
    """How far the outputs of one network are from each other.

    Attributes:
        text: in words.
        ratio: dB, the least ratio of signal to difference of any output; -inf where there is none.
    """

    text: str
    ratio: float = -math.inf


def difference(name: str, checkouts: tuple[Path, Path] | None) -> Distance:
    """Where the outputs of one network differ, and by how much. Without checkouts nobody can say: any ratio holds."""
    if checkouts is None:
        return Distance("with --against its values can be seen", math.inf)
    with tempfile.TemporaryDirectory() as folder:
        values, ends = [], []
        for index, side in enumerate(checkouts):
            keep = Path(folder, str(index))
            keep.mkdir()
            ends.append(run(side, [name], 1, keep).results[name])
            file = keep / f"{name}.safetensors"
            values.append(load_file(file) if file.exists() else {})
    mine, theirs = values
    if not mine or not theirs:
        return Distance(f"{ends[0]} here, {ends[1]} there")
    if [(key, one.shape, one.dtype) for key, one in mine.items()] != [(k, o.shape, o.dtype) for k, o in theirs.items()]:
        return Distance("outputs of other number, shapes or dtypes")
    unlike = {key: distance(mine[key], theirs[key]) for key in mine if not torch.equal(mine[key], theirs[key])}
    if not unlike:
        return Distance("equal when run alone: something depends on what ran before, or on memory")
    text = "; ".join(f"{key}: {one.text}" for key, one in list(unlike.items())[:3])
    return Distance(text, min(one.ratio for one in unlike.values()))


def distance(one: torch.Tensor, other: torch.Tensor) -> Distance:
    one, other = one.double(), other.double()
    off = (one - other).abs()
    ratio = float(10 * torch.log10(other.square().sum() / off.square().sum()))
    text = f"{int((off > 0).sum())} of {off.numel()} values, by {float(off.max()):.3g} at most, {ratio:.1f} dB"
    return Distance(text, ratio if math.isfinite(ratio) else -math.inf)


if __name__ == "__main__":
    sys.exit(main())
