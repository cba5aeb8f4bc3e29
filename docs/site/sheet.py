"""A sheet of the documentation's pictures: an SVG of boxes, lines and words.

It is 360 units wide, so that a phone shows it at its own size. Colours are CSS variables of static/site.css, light and
dark; the values here are what a viewer without that file shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape

WIDTH = 360
COLOURS = {
    "ink": "#1f2430", "soft": "#5d6675", "line": "#9aa3b2", "paper": "#f3f5f9", "blue": "#1f5fbf",
    "blue-fill": "#dbe8fb", "red": "#b3261e", "red-fill": "#fbdedb", "green": "#1c6b3c", "green-fill": "#d8f0e0",
}  # fmt: skip


def colour(name: str) -> str:
    """A colour of COLOURS, as CSS; "none" is none."""
    return name if name == "none" else f"var(--drawing-{name}, {COLOURS[name]})"


class Sheet:
    """One drawing: elements in the order in which they are put on it."""

    def __init__(self, height: float, title: str) -> None:
        self.height, self.title = height, title
        self.elements: list[str] = []

    def add(self, element: str, **attributes: object) -> None:
        values = " ".join(f'{name.replace("_", "-")}="{escape(_text(value))}"' for name, value in attributes.items())
        self.elements.append(f"<{element} {values}/>")

    def text(
        self, x: float, y: float, words: str, *, size: float = 12, fill: str = "ink", anchor: str = "start",
        bold: bool = False, code: bool = False,
    ) -> None:  # fmt: skip
        family = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" if code else "inherit"
        style = f"font-family:{family};font-size:{_text(size)}px;fill:{colour(fill)}" + (";font-weight:600" * bold)
        self.elements.append(
            f'<text x="{_text(x)}" y="{_text(y)}" text-anchor="{anchor}" style="{style}">{escape(words)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = "line", width: float = 1.2) -> None:
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, style=f"stroke:{colour(stroke)};stroke-width:{_text(width)}")

    def area(
        self, x: float, y: float, width: float, height: float, *, fill: str, stroke: str = "none", round: float = 0
    ):
        style = f"fill:{colour(fill)};stroke:{colour(stroke)}"
        self.add("rect", x=x, y=y, width=width, height=height, rx=round, style=style)

    def arrow(self, points: Sequence[tuple[float, float]], *, stroke: str = "soft") -> None:
        """A line through points, upright or level, with a head at its end."""
        for (x1, y1), (x2, y2) in itertools.pairwise(points):
            self.line(x1, y1, x2, y2, stroke=stroke)
        (x1, y1), (x2, y2) = points[-2:]
        across, along = (4.0, 7.0 if y2 > y1 else -7.0) if x1 == x2 else (7.0 if x2 > x1 else -7.0, 4.0)
        ends = (
            [(x2 - across, y2 - along), (x2 + across, y2 - along)]
            if x1 == x2
            else [(x2 - across, y2 - along), (x2 - across, y2 + along)]
        )
        corners = " ".join(f"{_text(x)},{_text(y)}" for x, y in [(x2, y2), *ends])
        self.add("polygon", points=corners, style=f"fill:{colour(stroke)}")

    def box(
        self, x: float, y: float, width: float, height: float, lines: Sequence[str], *, kind: str = "paper",
        size: float = 12,
    ) -> None:  # fmt: skip
        """A box with centred lines; the first of several is bold, and one that begins with a backtick is code."""
        fill, stroke = ("paper", "line") if kind == "paper" else (f"{kind}-fill", kind)
        self.area(x, y, width, height, fill=fill, stroke=stroke, round=6)
        step = size * 1.35
        first = y + height / 2 - step * (len(lines) - 1) / 2 + size * 0.35
        for place, words in enumerate(lines):
            self.text(
                x + width / 2, first + place * step, words.removeprefix("`"), size=size, anchor="middle",
                code=words.startswith("`"), bold=place == 0 and len(lines) > 1, fill="ink",
            )  # fmt: skip

    def __str__(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_text(self.height)}" role="img" '
            f'font-family="Helvetica, Arial, sans-serif" '
            f'aria-label="{escape(self.title)}">\n<title>{escape(self.title)}</title>\n'
        )
        return head + "\n".join(self.elements) + "\n</svg>\n"


def _text(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
