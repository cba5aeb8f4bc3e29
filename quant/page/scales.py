"""Drawings that are files of their own: bars by name, and points over two axes, as SVG with its numbers beside it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quant.calibrate.whole_files import replace_file
from quant.page.markup import Markup, join, tag

INK, SOFT, LINE, BLUE, RED = "#1d2530", "#5c6672", "#dfddd6", "#1f6f8b", "#b42318"
FONT = "13px system-ui, sans-serif"
ROW, LABEL, BARS, NUMBER = 22, 260, 420, 70
"""Pixels: the height of a bar's row, and the widths of names, bars and numbers."""


@dataclass(frozen=True)
class Point:
    """A point of `drawn_points`.

    Attributes:
        x, y: on the two axes.
        says: shown where the mouse points at it, and beside it where it is marked.
        marked: whether it is drawn large, in another colour, with its words.
    """

    x: float
    y: float
    says: str
    marked: bool = False


def drawn_bars(path: str | os.PathLike[str], title: str, bars: Sequence[tuple[str, float]]) -> None:
    """Write bars by name; one that is not finite is as long as the longest.

    Raises:
        ValueError: `path` does not end in .svg.
    """
    finite = [value for _, value in bars if math.isfinite(value)]
    top = max([1.0, *finite])
    rows = []
    for place, (name, value) in enumerate(bars):
        y = (place + 2) * ROW
        length = BARS * (min(max(value, 0.0), top) / top if math.isfinite(value) else 1.0)
        rows += [
            svg_text(LABEL - 8, y + 15, _short(name), anchor="end"),
            tag("rect", x=LABEL, y=y + 3, width=f"{length:.1f}", height=ROW - 6, fill=BLUE),
            svg_text(LABEL + length + 6, y + 15, f"{value:.1f}", fill=SOFT),
        ]
    write_svg(path, LABEL + BARS + NUMBER, (len(bars) + 3) * ROW, title, join(*rows))


def drawn_points(
    path: str | os.PathLike[str], title: str, axes: tuple[str, str], points: Sequence[Point], floor: float | None = None
) -> None:
    """Write points over two axes, `axes` being their names, with a line at y = `floor`.

    Raises:
        ValueError: `path` does not end in .svg.
    """
    wide, high, left, above = 560.0, 340.0, 80.0, 40.0
    shown = [one for one in points if math.isfinite(one.x) and math.isfinite(one.y)]
    xs = _span([one.x for one in shown])
    ys = _span([one.y for one in shown] + ([] if floor is None else [floor]))

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - xs[0]) / (xs[1] - xs[0]), (y - ys[0]) / (ys[1] - ys[0])
        return left + wide * across, above + high * (1 - up)

    drawn = [tag("rect", x=left, y=above, width=wide, height=high, fill="none", stroke=LINE)]
    for end in (0, 1):
        drawn.append(svg_text(left + wide * end, above + high + 18, f"{xs[end]:.4g}", anchor="middle", fill=SOFT))
        drawn.append(svg_text(left - 8, above + high * (1 - end) + 4, f"{ys[end]:.4g}", anchor="end", fill=SOFT))
    drawn.append(svg_text(left + wide / 2, above + high + 34, axes[0], anchor="middle"))
    drawn.append(svg_text(left, above - 8, axes[1]))
    if floor is not None:
        y = place(xs[0], floor)[1]
        drawn.append(
            tag("line", x1=left, x2=left + wide, y1=f"{y:.1f}", y2=f"{y:.1f}", stroke=RED, stroke_dasharray="4")
        )
    for one in shown:
        x, y = place(one.x, one.y)
        dot = tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=6 if one.marked else 4, fill=RED if one.marked else BLUE)
        drawn.append(tag("g", tag("title", one.says), dot))
        if one.marked:
            drawn.append(svg_text(x + 9, y + 4, one.says))
    write_svg(path, left + wide + 160, above + high + 50, title, join(*drawn))


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis: those of the values and a margin, apart even where the values are equal."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _short(name: str) -> str:
    return name if len(name) <= 36 else f"...{name[-33:]}"


def svg_text(x: float, y: float, words: str, anchor: str = "start", fill: str = INK) -> Markup:
    """A line of text that begins, ends or has its middle at x, by the anchor."""
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, fill=fill, style=f"font:{FONT}")


def write_svg(path: str | os.PathLike[str], width: float, height: float, title: str, content: Markup) -> None:
    """Write a drawing with its title on a white ground.

    Raises:
        ValueError: `path` does not end in .svg.
    """
    where = Path(path)
    if where.suffix != ".svg":
        raise ValueError(f"plot: {where.name} ends in {where.suffix!r}, expected .svg")
    ground = tag("rect", x=0, y=0, width=width, height=height, fill="#ffffff")
    size = {"width": f"{width:.0f}", "height": f"{height:.0f}", "viewBox": f"0 0 {width:.0f} {height:.0f}"}
    drawing = tag(
        "svg", ground, svg_text(12, 22, title), content, xmlns="http://www.w3.org/2000/svg", role="img", **size
    )
    replace_file(where, drawing + "\n", "plot")
