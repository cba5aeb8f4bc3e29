"""What the house looks like: packages, their sizes, and who imports whom. `make architecture`.

    python tests/architecture/run.py                       # of this checkout
    python tests/architecture/run.py --checkout ../older   # of another, to compare
    python tests/architecture/run.py --arrows quant.ops    # every import from and to one unit, with file and line
    python tests/architecture/run.py --climbing            # the list for order.py

sources.py says what a unit is, order.py in which order they stand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests/, where `architecture` is a package

from architecture.order import ORDER, climbing
from architecture.sources import Arrow, File, arrows, cycles, files

ROOT = Path(__file__).resolve().parents[2]

LONG = 300
"""Lines above which a file is listed."""

VAGUE = ("found", "made", "given", "taken", "becomes", "amounts")
"""Words that say little where they stand for a thing; counted in code, comments and docstrings together."""


def main() -> int:
    options = parsed()
    sources = files(options.checkout)
    found = arrows(sources)
    if options.climbing:
        print(as_table(climbing(found)))
    elif options.arrows:
        print(*[one for one in found if options.arrows in (one.source, one.target)], sep="\n")
    else:
        print("\n\n".join([sizes(sources, found), between(found), circles(found), longest(sources), words(sources)]))
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="folder of the sources (default: this one)")
    parser.add_argument("--arrows", metavar="UNIT", help="print every import from and to one unit")
    parser.add_argument(
        "--climbing", action="store_true", help="print the imports against the order, as order.py has them"
    )
    return parser.parse_args()


def sizes(sources: list[File], found: list[Arrow]) -> str:
    """A line per unit, in the order of ORDER."""
    files_of, lines_of = Counter(one.unit for one in sources), Counter[str]()
    for one in sources:
        lines_of[one.unit] += one.lines
    place = {unit: index for index, unit in enumerate(ORDER)}
    rows = [("unit", "files", "lines", "imports", "imported")]
    for unit in sorted(files_of, key=lambda unit: (place.get(unit, len(ORDER)), unit)):
        targets = {one.target for one in found if one.source == unit}
        readers = {one.source for one in found if one.target == unit}
        mark = "" if unit in place else " (not in order.py)"
        rows.append((unit + mark, str(files_of[unit]), str(lines_of[unit]), str(len(targets)), str(len(readers))))
    rows.append(("all", str(len(sources)), str(lines_of.total()), "", ""))
    return "\n".join(f"{row[0]:34}{row[1]:>6}{row[2]:>8}{row[3]:>9}{row[4]:>9}" for row in rows)


def between(found: list[Arrow]) -> str:
    """The units that each imports, with the number of import lines."""
    lines = Counter((one.source, one.target) for one in found)
    marked = {(one.source, one.target) for one in found if one.where != "top"}
    rows = [f"{len(lines)} arrows between units, {lines.total()} lines of import (* some in functions or for types)"]
    for source in dict.fromkeys(one.source for one in found):
        targets = [
            f"{target} {count}{'*' if (source, target) in marked else ''}"
            for (other, target), count in sorted(lines.items())
            if other == source
        ]
        rows.append(f"  {source} -> {', '.join(targets)}")
    return "\n".join(rows)


def circles(found: list[Arrow]) -> str:
    groups = cycles(found)
    rows = [f"cycles between units: {len(groups)}"]
    rows += [f"  {len(group)} units: {', '.join(sorted(group))}" for group in groups]
    against = climbing(found)
    rows.append(f"lines of import against the order: {len(against)}")
    return "\n".join([*rows, *[f"  {one}" for one in against]])


def as_table(against: list[Arrow]) -> str:
    modules: dict[str, set[str]] = {}
    for one in against:
        modules.setdefault(one.file, set()).add(one.module)
    return "\n".join(
        f'    "{file}": {tuple(sorted(names))!r},'.replace("'", '"') for file, names in sorted(modules.items())
    )


def longest(sources: list[File]) -> str:
    long = sorted((one for one in sources if one.lines > LONG), key=lambda one: -one.lines)
    rows = [f"files of more than {LONG} lines: {len(long)}"]
    return "\n".join([*rows, *[f"{one.lines:6} {one.path}" for one in long]])


def words(sources: list[File]) -> str:
    counts = {word: sum(len(re.findall(rf"\b{word}\b", one.text)) for one in sources) for word in VAGUE}
    return "vague words: " + ", ".join(f"{word} {count}" for word, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())
