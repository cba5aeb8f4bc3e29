"""`make sanitize`: the extension, as torch loads it, under AddressSanitizer and UndefinedBehaviorSanitizer.

The extension is compiled once more into build/sanitize (ten minutes of one core). The tests of the kernels and slices
of their fuzzers run over that, with the libraries of the sanitizers preloaded, since Python and torch have none. A
report ends its process, which fails a step; what a fuzzer's child has to say is shown by the command that the fuzzer
prints, behind `--run`. Leaks are not looked for: torch and Python leave much to the end of the process.

    python tests/kernels/sanitize.py --seconds 600 --seed 1000     # each fuzzer for so long, from another case on
    python tests/kernels/sanitize.py --run python -c 'import quant'    # anything else with that extension
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from quant.kernels import build as compiling

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / "build" / "sanitize"
FLAGS = (
    *("-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-omit-frame-pointer", "-O1", "-g1"),
    "-D_GLIBCXX_ASSERTIONS",
)
"""`vptr` would need the names of torch's types. What the children of fuzzers do after a report is not looked at."""
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so")
"""Preloaded, in this order: AddressSanitizer takes the place of the C++ library's throwing only where it is there."""
LEFT_OUT = ("amx", "core", "cpp_coverage", "fuzzing", "instruction_sets", "of_thread", "readme", "sanitize", "team")
"""Tests of programs that they compile themselves, which has nothing of the extension; and the fuzzers' own."""
FUZZERS = ("arguments", "kernels", "plans")
SECONDS = float(os.environ.get("OCTET_FUZZ_SECONDS", "60"))


def built(jobs: int | None = None) -> Path:
    """The extension, compiled where it is not current.

    Raises:
        compiling.BuildError: as `compiling.build`.
    """
    OUT.mkdir(parents=True, exist_ok=True)
    target, stamp = compiling.host_target(OUT / "_octet.so"), OUT / "stamp"
    wanted = compiling.fingerprint(target) + repr(FLAGS)
    if not target.output.exists() or not stamp.exists() or stamp.read_text() != wanted:
        print(f"compiling {len(compiling.sources(target))} files with {' '.join(FLAGS)} ...", flush=True)
        compiling.build_each([target], jobs=jobs, flags=FLAGS)
        stamp.write_text(wanted)
    return target.output


def library(name: str) -> str:
    """The path of a library of the compiler's. Raises BuildError where it has none."""
    cxx = compiling.require_compiler()
    found = subprocess.run([cxx, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        raise compiling.BuildError(f"{cxx} has no {name}: GCC's sanitizers are needed (on Debian: apt install g++)")
    return found


def environment(extension: Path) -> dict[str, str]:
    """Of a process that loads this extension, and ends at a report."""
    return {
        **os.environ,
        "QUANT_EXTENSION": str(extension),
        "LD_PRELOAD": " ".join(map(library, LIBRARIES)),
        # Sizes beyond all memory are errors of torch's, and what was not written is no zero.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_malloc_fill_size=1048576:malloc_fill_byte=165:"
        "detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
    }


def steps(seconds: float, seed: int, words: Sequence[str]) -> dict[str, list[str]]:
    """Name -> command of what runs over the extension; `words` go to pytest."""
    tests = [str(HERE), *(f"--ignore={HERE / f'test_{name}.py'}" for name in LEFT_OUT)]
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--capture=sys", "-o", "timeout=3600"]
    fuzzers = {
        name: [
            *(sys.executable, str(HERE / f"fuzz_{name}.py")),
            *("--seconds", str(seconds), "--seed", str(seed)),
        ]
        for name in FUZZERS
    }
    return {"tests": [*pytest, *tests, *words], **fuzzers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of each fuzzer; default: OCTET_FUZZ_SECONDS, or %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="of each fuzzer's first case")
    parser.add_argument("--jobs", type=int, help="compilers at once (default: a core each)")
    parser.add_argument("--only", choices=["tests", *FUZZERS], help="one step")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="this command instead")
    options, words = parser.parse_known_args()
    try:
        around = environment(built(options.jobs))
    except compiling.BuildError as error:
        print(f"make sanitize: {error}", file=sys.stderr)
        return 1
    commands = steps(options.seconds, options.seed, words)
    if options.only:
        commands = {options.only: commands[options.only]}
    if options.run:
        commands = {" ".join(options.run): options.run}
    failed = []
    for name, command in commands.items():
        print(f"--- {name}", flush=True)
        if subprocess.run(command, cwd=ROOT, env=around, check=False).returncode:
            failed.append(name)
    print(f"{len(commands)} steps, {len(failed)} failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
