"""`make coverage-kernels`: the lines and branches of the C++ that tests and fuzzers execute, file by file, by gcov.

The extension, the core and the runner are compiled once more with `--coverage -O1` into build/coverage (ten minutes
of one core). The tests of the kernels and slices of their fuzzers run over that on each instruction set of the machine,
then the runner's tests. A line is executed where it is in one of its template's instances. Branches are those that the
source decides; that a call may throw is none of them.

    python tests/kernels/cpp_coverage.py --enough 2 --missing    # of each test function cases for 2 seconds
    python tests/kernels/cpp_coverage.py --report-only           # of what has run before
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.append(str(Path(__file__).resolve().parents[2]))

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "coverage"
FLAGS = ("--coverage", "-O1")
SOURCES = ROOT / "kernels"
LEFT_OUT = ("core", "cpp_coverage", "instruction_sets", "team")
"""Tests of programs that they compile themselves, of which nothing is counted."""
LIMITED = "tests/quant/test_runner_memory.py::test_a_full_disk_leaves_the_old_output"
"""In which the counts cannot be written either."""
OTHER_TESTS = ("benchmark", "runner", "runner_files", "runner_layers", "runner_memory", "runner_networks")
"""Of tests/quant: what times the lines of a plan, and the runner."""
BRANCHLESS = (0, 0)


@dataclass
class Lines:
    """What was executed of one source.

    Attributes:
        counts: line -> how often it ran, in whatever instance.
        branches: line -> for each instance with branches there, how often each of them was taken.
    """

    counts: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    branches: dict[int, list[list[int]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, line: dict[str, Any]) -> None:
        """A line of gcov's JSON: one instance, in one object."""
        number = line["line_number"]
        self.counts[number] += line["count"]
        decided = [one["count"] for one in line["branches"] if not one["throw"]]
        if len(decided) > 1:  # beside a call that may throw there is one more, which is no choice
            self.branches[number].append(decided)

    @property
    def missing(self) -> list[int]:
        """The lines that never ran."""
        return sorted(number for number, count in self.counts.items() if not count)

    @property
    def executed(self) -> tuple[int, int]:
        """How many lines ran, of how many."""
        return sum(map(bool, self.counts.values())), len(self.counts)

    @property
    def taken(self) -> tuple[int, int]:
        """How many branches were taken, of how many.

        The compiler repeats a line that it unrolls, in some instances: those of the instance with the fewest count, and
        the others by turns as these.
        """
        taken = every = 0
        for instances in self.branches.values():
            fewest = min(map(len, instances))
            every += fewest
            taken += sum(any(any(one[place::fewest]) for one in instances) for place in range(fewest))
        return taken, every


def build() -> tuple[Path, Path]:
    """Compile what is missing or not current; returns the extension, and the folder with octet-run."""
    from quant.kernels import build as compiling

    from tests.quant.fuzz_runner import load_by_path

    running = load_by_path("runner_build", SOURCES / "runner" / "build.py")
    OUT.mkdir(parents=True, exist_ok=True)
    target = compiling.host_target(OUT / "_octet.so")
    core, stamp = OUT / "liboctet_core.a", OUT / "stamp"
    settings = running.Settings(target.cxx, target.arch, OUT / "runner", flags=FLAGS, core=core)
    wanted = compiling.fingerprint(target) + running.fingerprint(settings)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"compiling {len(compiling.sources(target))} files with {' '.join(FLAGS)} ...", flush=True)
        for folder in ("objects", "runner"):
            shutil.rmtree(OUT / folder, ignore_errors=True)
        compiling.build_each([target], core=core, jobs=1, flags=FLAGS, objects_in=OUT / "objects")
        running.build(settings, jobs=1)
        stamp.write_text(wanted)
    return target.output, settings.out


def usable_isas() -> list[str]:
    from tests.kernels import fuzzing

    return fuzzing.usable_isas()


def run(what: str, command: Sequence[object], environment: dict[str, str]) -> bool:
    """Run one piece; whether it passed."""
    print(f"\n--- {what}", flush=True)
    done = subprocess.run(list(map(str, command)), cwd=OUT, check=False, env={**os.environ, **environment})
    if done.returncode:
        print(f"{what}: ended with {done.returncode}", flush=True)
    return done.returncode == 0


def pytest(files: Iterable[Path], enough: float) -> list[object]:
    """The command that runs some tests, the cases of each function for so many seconds."""
    return [sys.executable, "-m", "pytest", "-q", "-n", "0", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml",
            "-o", "timeout=3600", f"--enough={enough}", "--deselect", ROOT / LIMITED, *files]  # fmt: skip


def fuzz(name: str, count: int) -> None:
    """Cases of a fuzzer in this process: gcov's counts are written when it ends as usual, which its children do not."""
    from tests.kernels import fuzz_kernels, fuzz_plans
    from tests.kernels.fuzzing import Draws, Wrong

    fuzzer = {"fuzz_kernels": fuzz_kernels, "fuzz_plans": fuzz_plans}[name].fuzzer()
    for number in range(count):
        kind = fuzzer.kinds[number % len(fuzzer.kinds)]
        try:
            fuzzer.check(kind, Draws(f"{kind} {number}"), lambda: None)
        except Wrong as wrong:
            print(f"{name}: case {number}: {wrong}", flush=True)


def execute(extension: Path, runner: Path, enough: float, count: int, isas: Sequence[str]) -> bool:
    """All pieces; whether all passed."""
    environment = {
        "QUANT_EXTENSION": str(extension), "OCTET_RUNNER": str(runner), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1",
    }  # fmt: skip
    left_out = {f"test_{name}.py" for name in LEFT_OUT}
    files = [path for path in sorted((ROOT / "tests" / "kernels").glob("test_*.py")) if path.name not in left_out]
    for counts in OUT.rglob("*.gcda"):
        counts.unlink()
    passed = True
    for isa in isas:
        # What tests do in processes of their own, and around the products of other libraries, once.
        own = {**environment, "QUANT_ISA": isa, "OCTET_FAST_TESTS": str(int(isa != isas[0]))}
        passed &= run(f"tests of the kernels, {isa}", pytest(files, enough), own)
        for name in ("fuzz_kernels", "fuzz_plans"):
            passed &= run(f"{name}, {isa}", [sys.executable, __file__, "--fuzz-here", name, "--count", count], own)
    files = [ROOT / "tests" / "quant" / f"test_{name}.py" for name in OTHER_TESTS]
    return run("tests of the runner and of timed plans", pytest(files, float("inf")), environment) and passed


def gather() -> dict[str, Lines]:
    """Source, from kernels/ on -> what was executed of it."""
    gcov = os.environ.get("GCOV") or shutil.which("gcov")
    if gcov is None:
        raise SystemExit("gcov was not found; it comes with GCC (Debian: apt install gcc), or $GCOV names it")
    sources: dict[str, Lines] = defaultdict(Lines)
    for notes in sorted(OUT.rglob("*.gcno")):
        done = subprocess.run([gcov, "-b", "-j", "-t", notes], capture_output=True, text=True, check=True, cwd=OUT)
        for file in json.loads(done.stdout)["files"]:
            path = Path(OUT, file["file"]).resolve()
            if path.is_relative_to(SOURCES):
                lines, closing = sources[path.relative_to(SOURCES).as_posix()], closing_lines(path)
                for line in file["lines"]:
                    if line["line_number"] not in closing:
                        lines.add(line)
    return dict(sorted(sources.items()))


@functools.cache
def closing_lines(source: Path) -> frozenset[int]:
    """The lines that close something and hold nothing else: what is there is destroyed, after an error too."""
    lines = source.read_text(encoding="utf-8").splitlines()
    return frozenset(number for number, line in enumerate(lines, 1) if re.fullmatch(r"[\s})\];,]*", line))


def ranges(numbers: Sequence[int]) -> str:
    """3, 4, 5, 9 as "3-5, 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def percent(part: tuple[int, int]) -> str:
    return f"{100 * part[0] / part[1]:6.1f} %" if part[1] else "       -"


def total(parts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    some, every = zip(BRANCHLESS, *parts, strict=True)
    return sum(some), sum(every)


def table(sources: dict[str, Lines], *, missing: bool) -> str:
    """A row a file, one a folder, and the sum."""
    folders: dict[str, list[Lines]] = defaultdict(list)
    width = max(map(len, sources))
    rows = [f"{'file':{width}}   lines  executed  branches     taken"]

    def row(name: str, every: Sequence[Lines]) -> str:
        lines, branches = total(one.executed for one in every), total(one.taken for one in every)
        return f"{name:{width}}  {lines[1]:6d}  {percent(lines)}    {branches[1]:6d}  {percent(branches)}"

    for name, lines in sources.items():
        folders[name.rpartition("/")[0]].append(lines)
        without = f"  {ranges(lines.missing)}" if missing and lines.missing else ""
        rows.append(row(name, [lines]) + without)
    rows.append("")
    rows += [row(f"{name}/", every) for name, every in folders.items()]
    return "\n".join([*rows, "", row("all", list(sources.values()))])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--enough",
        type=float,
        default=float("inf"),
        help="seconds for the cases of a test function (default: no limit)",
    )
    parser.add_argument("--count", type=int, default=5000, help="cases of each fuzzer on each instruction set")
    parser.add_argument("--isa", nargs="*", help="instruction sets (default: those of this machine)")
    parser.add_argument("--missing", action="store_true", help="name the lines that never ran")
    parser.add_argument("--report-only", action="store_true", help="of what has run before")
    parser.add_argument("--fuzz-here", choices=["fuzz_kernels", "fuzz_plans"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fuzz_here:
        fuzz(options.fuzz_here, options.count)
        return 0
    passed = True
    if not options.report_only:
        passed = execute(*build(), options.enough, options.count, options.isa or usable_isas()[::-1])
    print(table(gather(), missing=options.missing))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
