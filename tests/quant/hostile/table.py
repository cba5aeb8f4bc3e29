"""A table of all cases of the catalogue: what became of each, static and in training.

PYTHONPATH=tests/quant python -m hostile.table [PART OF A TITLE]
"""

from __future__ import annotations

import sys

from .cases import CATALOGUE
from .child import checks, outcomes
from .harness import Outcome


def main() -> None:
    part = " ".join(sys.argv[1:])
    listed = checks()
    numbers = [number for number, (case, _) in enumerate(listed) if part in case.title]
    found: dict[str, dict[str, Outcome]] = {}
    for number, outcome in outcomes(numbers).items():
        case, kind = listed[number]
        found.setdefault(case.title, {})[kind] = outcome
    failed = 0
    for title, both in sorted(found.items(), key=lambda item: list(CATALOGUE.cases).index(item[0])):
        bad = [outcome for outcome in both.values() if not outcome.passes(CATALOGUE.cases[title])]
        failed += bool(bad)
        cells = " ".join(f"{_cell(both[kind]):14}" for kind in both)
        print(f"{'FAIL' if bad else 'ok':5}{cells}{title}{': ' + bad[0].reason[:220] if bad else ''}")
    print(f"{len(found)} cases, {failed} fail")


def _cell(outcome: Outcome) -> str:
    return f"{outcome.status} {outcome.sqnr:.0f} dB" if outcome.status == "ok" else outcome.status


if __name__ == "__main__":
    main()
