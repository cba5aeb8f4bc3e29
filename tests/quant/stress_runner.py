"""`make stress-runner`: many threads on models of the runner, under ThreadSanitizer, AddressSanitizer or neither.

The program is kernels/runner/stress.cpp with the whole core under the sanitizer; the files are those of the runner's
tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.quant.fuzz_runner import CHECKOUT, load_by_path, saved

SECONDS = float(os.environ.get("OCTET_FUZZ_SECONDS", "60"))
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def stress(
    program: Path, seconds: float, threads: int, seed: int, files: list[Path], isa: str = "", *, shown: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the program over these files.

    Args:
        shown: what the program prints goes where this process prints, and is not in the result.
    """
    environment = {**os.environ, **OPTIONS, **({"QUANT_ISA": isa} if isa else {})}
    words = [program, seconds, threads, seed, *files]
    return subprocess.run(list(map(str, words)), capture_output=not shown, text=True, check=False, env=environment)


def main() -> int:
    build = load_by_path("runner_build", CHECKOUT / "kernels" / "runner" / "build.py")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="default: OCTET_FUZZ_SECONDS, or %(default)s")
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sanitizer", choices=[*build.SANITIZERS], default="thread")
    parser.add_argument("--isa", default="", help="an instruction set, as QUANT_ISA")
    options = parser.parse_args()
    kernels = build.kernels_build
    settings = build.Settings(
        kernels.require_compiler(), kernels.host_arch(), CHECKOUT / "build" / f"stress-{options.sanitizer}", "pool"
    )
    print(f"compiling the runner and the core (sanitizer: {options.sanitizer}) ...", flush=True)
    program = build.build_stress(settings, options.sanitizer)
    files = saved(settings.out)
    done = stress(program, options.seconds, options.threads, options.seed, files, options.isa, shown=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
