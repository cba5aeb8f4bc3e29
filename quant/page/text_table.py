"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of a table whose columns are aligned, the first `left` of them to the left; the first row is its head."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        aligned = (cell.ljust(wide) if place < left else cell.rjust(wide) for place, (cell, wide) in enumerate(cells))
        return "  ".join(aligned).rstrip()

    return [line(rows[0]), line(["-" * width for width in widths]), *map(line, rows[1:])]
