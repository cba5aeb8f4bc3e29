"""A drawing of where the time of a call goes: the call, below it its modules and their steps, as wide as their time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quant.page.markup import Markup, join, tag
from quant.page.scales import INK, LINE, SOFT, svg_text, write_svg

WIDTH, LEVEL, MARGIN = 960.0, 24.0, 12.0
"""Pixels: of the whole call, of a level's height, and around the drawing."""

LETTER = 7.2
"""Pixels that a letter of the labels takes, from above."""


@dataclass(frozen=True)
class Part:
    """A step of the drawing.

    Attributes:
        name: dotted; the parts before its last dot are the modules above it.
        share: of the whole, 0 to 1.
        says: shown where the mouse points at it.
        colour: of CSS.
    """

    name: str
    share: float
    says: str
    colour: str


@dataclass
class _Block:
    """A rectangle: neighbouring parts below one module, or one part."""

    name: str
    level: int
    begin: float
    share: float
    says: str
    colour: str


def drawn_flame(
    path: str | os.PathLike[str], title: str, whole: str, parts: Sequence[Part], legend: Mapping[str, str]
) -> None:
    """Write the drawing of a call with its parts in their order.

    Args:
        path: of an .svg file.
        whole: the label of the call, on the topmost level.
        parts: their shares add up to at most 1.
        legend: words -> the colour that they explain.

    Raises:
        ValueError: `path` does not end in .svg.
    """
    blocks = [_Block(whole, 0, 0.0, 1.0, whole, LINE), *_blocks(parts)]
    top = 36.0
    levels = 1 + max(one.level for one in blocks)
    drawn = [_drawn(one, top) for one in blocks if one.share * WIDTH >= 0.2]
    below = top + levels * LEVEL + 20
    x = MARGIN
    for words, colour in legend.items():
        drawn += [tag("rect", x=x, y=below - 10, width=12, height=12, fill=colour), svg_text(x + 18, below, words)]
        x += 18 + LETTER * len(words) + 24
    write_svg(path, WIDTH + 2 * MARGIN, below + 16, title, join(*drawn))


def _blocks(parts: Sequence[Part]) -> Iterator[_Block]:
    """The rectangles below the call; a module that is left and entered again has one for each stay."""
    open_blocks: list[_Block] = []
    at = 0.0
    for part in parts:
        *modules, _ = names = part.name.split(".")
        same = 0
        while same < min(len(modules), len(open_blocks)) and open_blocks[same].name == modules[same]:
            same += 1
        del open_blocks[same:]
        for level in range(same, len(modules)):
            block = _Block(modules[level], level + 1, at, 0.0, ".".join(modules[: level + 1]), LINE)
            open_blocks.append(block)
            yield block
        for block in open_blocks:
            block.share += part.share
        yield _Block(names[-1], len(names), at, part.share, part.says, part.colour)
        at += part.share


def _drawn(block: _Block, top: float) -> Markup:
    x, y, wide = MARGIN + WIDTH * block.begin, top + LEVEL * block.level, WIDTH * block.share
    letters = int((wide - 8) / LETTER)
    label = block.name if len(block.name) <= letters else f"{block.name[: letters - 1]}…" if letters > 2 else ""
    says = block.says if block.colour != LINE else f"{block.says}: {100 * block.share:.1f} % of the call"
    ink = INK if block.colour in (LINE, SOFT) else "#ffffff"
    return tag(
        "g",
        tag("title", says),
        tag(
            "rect", x=f"{x:.2f}", y=f"{y:.1f}", width=f"{max(wide - 0.5, 0.2):.2f}", height=LEVEL - 2, fill=block.colour
        ),
        svg_text(x + 5, y + 15, label, fill=ink) if label else None,
    )
