"""Checks cases in processes of their own, so that one that ends its process is an outcome like any other.

    PYTHONPATH=tests/quant python -m hostile.child NUMBER...

prints a line of JSON before and after each check, by its number in `checks()`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from .cases import CATALOGUE, Case
from .harness import CHECKS, Outcome
from .nested import nested

FOLDER = Path(__file__).resolve().parent
TIME_LIMIT = 300
"""Seconds for all checks of a child."""


def checks() -> list[tuple[Case, str]]:
    """Every case with every kind of quantisation; first all as they are, then all as children of another model."""
    importlib.import_module(f"{__package__}.catalogue")
    cases = list(CATALOGUE.cases.values())
    return [(case, kind) for case in [*cases, *map(nested, cases)] for kind in CHECKS]


def outcomes(numbers: Iterable[int]) -> dict[int, Outcome]:
    """The outcomes of checks, by their numbers, each made in a child process; a new one after each crash."""
    left, found = list(numbers), {}
    while left:
        part, ended = _one_child(left)
        found.update(part)
        left = [number for number in left if number not in part]
        if left:
            found[left[0]] = Outcome("crash", ended)
            left = left[1:]
    return found


def _one_child(numbers: list[int]) -> tuple[dict[int, Outcome], str]:
    """What a child said of these checks until it ended, and how that was."""
    path = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hostile.child", *map(str, numbers)]
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT)
        said, code, errors = run.stdout, run.returncode, run.stderr
    except subprocess.TimeoutExpired as slow:
        said, code, errors = (slow.stdout or b"").decode(), 0, f"not done after {TIME_LIMIT} s"
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"number"')]
    found = {line["number"]: Outcome(line["status"], line["reason"], line["sqnr"]) for line in lines}
    last = errors.strip().splitlines()[-1:] or [""]
    return found, f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}: {last[0]}"


def main() -> None:
    listed = checks()
    for number in map(int, sys.argv[1:]):
        case, kind = listed[number]
        outcome = CHECKS[kind](case)
        line = {"number": number, "status": outcome.status, "reason": outcome.reason, "sqnr": outcome.sqnr}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
