#!/usr/bin/env python3
"""Relative links of the documentation's pages that lead out of docs/ or to no file. `make lint` runs it.

Sphinx finds them too, after half a minute. Only the README outside docs/ may be linked to, as ../README.md of a page at
the top: conf.py makes the first page of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LINK = re.compile(r"\]\(<?([^)\s>]+)|^\[[^\]]+\]:\s+<?(\S+?)>?$")
"""[text](target) and [text]: target"""

CODE = re.compile(r"`[^`]*`")
FENCE = re.compile(r"\s*(```|~~~)(.*)")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//|#", re.IGNORECASE)
"""A target with a scheme, a host, or on the same page."""

README = "../README.md"


def faults(docs: Path) -> list[str]:
    """ "file:line: what is wrong", for each link that the site cannot have."""
    return [
        f"{page.relative_to(docs.parent)}:{number}: {fault}"
        for page in sorted(docs.rglob("*.md"))
        for number, target in links(page.read_text(encoding="utf-8"))
        if (fault := fault_of(docs, page, target))
    ]


def links(text: str) -> Iterator[tuple[int, str]]:
    """The line and target of each link of a page; code has none, a directive ("```{note}") may have some."""
    fence, is_code = "", False
    for number, line in enumerate(text.splitlines(), 1):
        begin = FENCE.match(line)
        if begin and not fence:
            fence, is_code = begin[1], not begin[2].startswith("{")
        elif begin and begin[1] == fence:
            fence, is_code = "", False
        elif not is_code:
            yield from ((number, one[1] or one[2]) for one in LINK.finditer(CODE.sub("", line)))


def fault_of(docs: Path, page: Path, target: str) -> str:
    """What is wrong with a link; '' where nothing is."""
    path = target.partition("#")[0]
    if ELSEWHERE.match(target) or (path == README and page.parent == docs):
        return ""
    file = (page.parent / path).resolve()
    if docs.resolve() not in file.parents:
        return f"the link to {target} leads out of docs/, expected a page: name the file in backquotes instead"
    return "" if file.exists() else f"the link to {target} leads to no file"


if __name__ == "__main__":
    wrong = faults(Path(__file__).resolve().parents[1])
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))
