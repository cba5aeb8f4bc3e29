"""How benchmarks show what they measured: tables and charts in plain text, or a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from harness import RESULTS


def duration(seconds: float) -> str:
    """In the unit that keeps three digits readable."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us" if seconds < 1e-4 else f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def text(line: Sequence[str]) -> str:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([text(lines[0]), "  ".join("-" * width for width in widths), *map(text, lines[1:])])


def absent_lines(absences: dict[str, dict[str, str]]) -> list[str]:
    """One line for each contender and reason, with where it holds."""
    where: dict[tuple[str, str], list[str]] = {}
    for case, missing in absences.items():
        for name, reason in missing.items():
            where.setdefault((name, reason), []).append(case)
    return [
        f"absent: {name}, because {reason}" + ("" if len(found) == len(absences) else f" ({', '.join(found)})")
        for (name, reason), found in where.items()
    ]


def show(values: dict[str, float], title: str, path: Path) -> str:
    """A bar for each value, as a picture at `path` or, where matplotlib is not installed, as text: what to print."""
    if plot(values, title, path):
        return f"chart: {path.relative_to(RESULTS.parents[1])}"
    return f"\n{title}\n{chart(values)}"


def chart(values: dict[str, float]) -> str:
    """A bar for each value on a linear scale from 0, with `|` where 1 lies."""
    width, top = 50, max([1.0, *values.values()])
    label = max(map(len, values), default=0)
    lines = []
    for name, value in values.items():
        bar = list(("#" * round(width * value / top)).ljust(width + 1))
        bar[round(width / top)] = "|"
        lines.append(f"{name.ljust(label)}  {''.join(bar).rstrip()} {value:.2f}")
    return "\n".join(lines)


def plot(values: dict[str, float], title: str, path: Path) -> bool:
    """The chart as a picture at `path`; False where matplotlib is not installed."""
    try:
        import matplotlib.figure
    except ImportError:
        return False
    figure = matplotlib.figure.Figure(figsize=(8, 1 + 0.25 * len(values)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(list(values), list(values.values()))
    axes.axvline(1.0, color="black")
    axes.invert_yaxis()
    axes.set_title(title)
    figure.savefig(path)
    return True
