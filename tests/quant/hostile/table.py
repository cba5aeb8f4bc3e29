"""A table of cases of the catalogue: what became of each, static and in training.

PYTHONPATH=tests/quant python -m hostile.table [--nested] [PART OF A TITLE]
"""

from __future__ import annotations

import json
import sys

from .child import checks, outcomes
from .harness import Outcome
from .nested import INSIDE


def main() -> None:
    """Print a line for each case, failures first, and how many fail."""
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    listed = checks()
    wanted = [
        number
        for number, (case, _) in enumerate(listed)
        if " ".join(words) in case.title and (INSIDE in case.title) == ("--nested" in sys.argv)
    ]
    found = outcomes(wanted)
    lines: dict[str, list[int]] = {}
    for number in wanted:
        lines.setdefault(listed[number][0].title, []).append(number)
    failed = [title for title, numbers in lines.items() if any(not found[n].passes(listed[n][0]) for n in numbers)]
    if "--not-yet" in sys.argv:
        for title in failed:
            kinds = [listed[n][1] for n in lines[title] if not found[n].passes(listed[n][0])]
            print(f"    {json.dumps(title)}: {json.dumps(' '.join(kinds))},")
        return
    for title in [*failed, *(title for title in lines if title not in failed)]:
        cells = " ".join(f"{_cell(found[number]):12}" for number in lines[title])
        bad = [found[number].reason for number in lines[title] if not found[number].passes(listed[number][0])]
        print(f"{'FAIL' if bad else 'ok':5}{cells}{title}{': ' + bad[0][:220] if bad else ''}")
    print(f"{len(lines)} cases, {len(failed)} fail")


def _cell(outcome: Outcome) -> str:
    return f"{outcome.sqnr:.0f} dB" if outcome.status == "ok" else outcome.status


if __name__ == "__main__":
    main()
