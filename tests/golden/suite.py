"""Whether the models that the tests convert or load give the same bytes with two versions of this package.

Each side runs its own tests, a process for each of their files; plugin.py hashes the models. What a file gave can be
kept, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests/, where `golden` is a package

from architecture.sources import FOLDERS, link
from golden.differences import Verdict, headings, judge
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/quant", "tests/calibrate", "tests/observers")
"""Where tests convert models. Those of tests/quant/hostile are slow: they are run where they are asked for by name."""

HASH = re.compile("[0-9a-f]{32}")
"""What stands for tensors; the name of an error stands for a model that cannot be run."""


@dataclass
class SuiteSide:
    """What test files gave on one side.

    Attributes:
        outcomes: per test "passed", "failed" or "skipped"; "collected" in a file that the other side does not have.
        hashes: per model of a test, and per sort of tensors ("outputs", "weights"), the hash or an error's name.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)

    def add(self, other: SuiteSide) -> None:
        self.outcomes |= other.outcomes
        self.hashes |= other.hashes


def compare_suites(here: Path, there: Path, files: Iterable[str], results: Path | None) -> int:
    """Run the files of tests on both sides and print what differs; 0 where nothing does without a reason."""
    sides = (here, there)
    of_side = [test_files(side, files) for side in sides]
    kept = Results(results, sides)
    both = [SuiteSide(), SuiteSide()]
    names, shared = sorted({*of_side[0], *of_side[1]}), {*of_side[0]} & {*of_side[1]}
    with tqdm(total=len(of_side[0]) + len(of_side[1]), disable=None) as bar:
        for name in names:
            bar.set_description(name.removeprefix("tests/"))
            for tests, side, own in zip(both, sides, of_side, strict=True):
                if name in shared:
                    tests.add(kept.of(side, name) or kept.put(side, name, run_file(side, name)))
                elif name in own:
                    tests.add(run_file(side, name, only_names=True))
                bar.update(name in own)
    return report_suite(*both, judge_places(*both, sides, names))


def test_files(checkout: Path, wanted: Iterable[str]) -> list[str]:
    """Relative paths of the test files that are wanted, files or folders; of all folders, where none is."""
    result = list[str]()
    for name in wanted or TESTS:
        path = checkout / name
        inner = sorted(path.glob("test_*.py")) if path.is_dir() else [path] * path.exists()
        result.extend(one.relative_to(checkout).as_posix() for one in inner)
    return result


def run_file(checkout: Path, name: str, only_names: bool = False) -> SuiteSide:
    """What the tests of one file give with the package of their own checkout.

    A test that starts a process with an import path of its own meets the installed package there; that process's models
    are not hashed.
    """
    with tempfile.TemporaryDirectory() as folder:
        site, out = Path(folder, "site"), Path(folder, "out")
        site.mkdir()
        out.mkdir()
        link(checkout, site)
        path = os.pathsep.join((str(site), str(ROOT / "tests")))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        environment["OCTET_GOLDEN"] = str(out)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "golden.plugin", "-p", "no:cacheprovider", "--tb=no"]
        command += ["--collect-only"] * only_names
        shown = subprocess.run([*command, name], cwd=checkout, env=environment, capture_output=True, text=True)
        lines = [json.loads(line) for file in sorted(out.iterdir()) for line in file.read_text().splitlines()]
    if shown.returncode not in (0, 1, 5):  # 1: some failed; 5: none was collected
        raise RuntimeError(f"{checkout}: {name}: {shown.stdout[-2000:]}{shown.stderr[-2000:]}")
    return SuiteSide(*({key: value for what, key, value in lines if what == sort} for sort in ("test", "model")))


class Results:
    """A file of what each side's test files gave: a line each, of the very sources that gave it."""

    def __init__(self, path: Path | None, sides: Iterable[Path]) -> None:
        self.path = path
        self.sources = {side: sources_hash(side) for side in sides}
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.known = {(line["sources"], line["file"]): SuiteSide(line["outcomes"], line["hashes"])
                      for line in map(json.loads, lines)}  # fmt: skip

    def of(self, side: Path, name: str) -> SuiteSide | None:
        return self.known.get((self.sources[side], name))

    def put(self, side: Path, name: str, tests: SuiteSide) -> SuiteSide:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({"sources": self.sources[side], "file": name, **asdict(tests)}) + "\n")
        return tests


def sources_hash(checkout: Path) -> str:
    """Of the packages with their kernels, of the tests, and of what hashes here."""
    folders = [checkout / folder for folder in (*FOLDERS.values(), *TESTS)]
    paths = [path for folder in folders for end in ("py", "so") for path in folder.rglob(f"*.{end}")]
    hashed = hashlib.sha256()
    for path in [*sorted(paths), *(Path(__file__).with_name(name) for name in ("plugin.py", "hashing.py"))]:
        hashed.update(f"{path.name} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return hashed.hexdigest()[:16]


def judge_places(here: SuiteSide, there: SuiteSide, sides: tuple[Path, Path], names: Iterable[str]) -> Verdict:
    both = [place for place in here.hashes if place in there.hashes]
    differing = [place for place in both if here.hashes[place] != there.hashes[place]]
    decisions = tuple(map(headings, sides))
    return judge(differing, *decisions, compared=lambda name: file_of(name) in names)


def report_suite(here: SuiteSide, there: SuiteSide, verdict: Verdict) -> int:
    """Print how many models are equal, and name what is not; 0 where each difference has its reason."""
    for where, one, other in (("here", here, there), ("there", there, here)):
        name_all(f"tests {where} alone", tests_alone(one, other))
        models = [place for place in one.hashes if place not in other.hashes and test_of(place) in other.outcomes]
        name_all(f"models {where} alone, of tests of both", models)
        name_all(f"tests that failed {where}", [name for name, end in one.outcomes.items() if end == "failed"])
    both = [place for place in here.hashes if place in there.hashes]
    for what in ("outputs", "weights"):
        places = [place for place in both if place.endswith(what)]
        equal = [place for place in places if here.hashes[place] == there.hashes[place]]
        errors = sum(not HASH.fullmatch(here.hashes[place]) for place in equal)
        print(f"{what:10}{len(equal):6} of {len(places):5} equal, {errors} of them by ending with the same error")
    verdict.show()
    equal = sum(here.hashes[place] == there.hashes[place] for place in both)
    print(f"{equal} outputs and weights equal, {verdict.summary()}")
    return 1 if verdict.failed or not both else 0


def name_all(what: str, names: list[str]) -> None:
    print(f"{what}: {len(names)}", *names, sep="\n    ")


def tests_alone(one: SuiteSide, other: SuiteSide) -> list[str]:
    """The tests that one side has alone, a file that it has alone as one line."""
    files = {file_of(test) for test in other.outcomes}
    alone = [test for test in one.outcomes if test not in other.outcomes]
    whole = Counter(file_of(test) for test in alone if file_of(test) not in files)
    names = [test for test in alone if file_of(test) in files]
    return [*names, *(f"{file}: all of its {count} tests" for file, count in whole.items())]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def test_of(place: str) -> str:
    """tests/a.py::test_b[c] load #0 outputs -> tests/a.py::test_b[c]"""
    return place.rpartition(" #")[0].removesuffix(" load")
