"""The page's two drawings, as inline SVG that stretches with its box; numbers stand beside it, and stay legible."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quant.error_parts import Histogram, StepError
from quant.page.markup import Markup, join, tag

TOP = 60.0
"""dB at the upper edge of drawings: an error of a thousandth, which is never a concern."""

WIDTH, HEIGHT = 640.0, 100.0


def share(decibels: float) -> float:
    """Where a number of dB lies between 0 and TOP: 0 to 1."""
    return 0.0 if math.isnan(decibels) else min(max(decibels / TOP, 0.0), 1.0)


def error_through(steps: Sequence[StepError]) -> Markup:
    """Error step by step, as the model runs: a line for all of it and a bar for what each step adds, from above.

    The bars hang down from TOP to the step's own SQNR, so that a long bar is a bad layer.
    """
    wide = WIDTH / max(len(steps), 1)
    grid = [_level(level) for level in (0, 20, 40, TOP)]
    bars, points = [], []
    for place, step in enumerate(steps):
        own, total = HEIGHT * (1 - share(step.own_sqnr)), HEIGHT * (1 - share(step.sqnr))
        says = f"{step.name}: adds {step.own_sqnr:.1f} dB, {step.sqnr:.1f} dB with all before it"
        bars.append(
            tag(
                "rect", x=f"{place * wide:.1f}", y=0, width=f"{wide * 0.72:.2f}", height=f"{own:.1f}", fill="var(--own)"
            )
        )
        bars.append(_tip(place * wide, wide, says))
        points.append(f"{(place + 0.36) * wide:.1f},{total:.1f}")
    line = tag("polyline", points=" ".join(points), fill="none", stroke="var(--poor)", stroke_width=2,
               vector_effect="non-scaling-stroke", stroke_linejoin="round")  # fmt: skip
    labels = [tag("i", f"{level:.0f}", style=f"bottom:{100 * share(level):.0f}%") for level in (0, 20, 40, TOP)]
    drawing = tag("svg", *grid, *bars, line, viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", preserveAspectRatio="none",
                  role="img", aria_label="SQNR in dB of every step, in the order of the model")  # fmt: skip
    return tag("div", drawing, *labels, class_="chart")


def _level(level: float) -> Markup:
    y = HEIGHT * (1 - share(level))
    return tag("line", x1=0, x2=WIDTH, y1=y, y2=y, stroke="var(--line)", vector_effect="non-scaling-stroke")


def _tip(x: float, width: float, says: str) -> Markup:
    """A transparent column over the whole height, which shows its step's numbers on hovering."""
    area = f"M{x:.1f} 0h{width:.2f}v{HEIGHT:.0f}h-{width:.2f}z"
    return tag("path", tag("title", says), d=area, fill="transparent")


def histogram(counted: Histogram, low: float | None, high: float | None) -> Markup:
    """How often values occur (the bars' heights are logarithms), the int8 range behind them, clipped ones in red."""
    left, right = (
        (counted.low, counted.high) if low is None or high is None else (min(counted.low, low), max(counted.high, high))
    )
    span = (right - left) or 1.0
    band = []
    if low is not None and high is not None:
        start, end = _place(low, left, span), _place(high, left, span)
        band.append(tag("rect", x=f"{start:.1f}", y=0, width=f"{end - start:.1f}", height=HEIGHT, fill="var(--band)"))
        band += [_edge(start), _edge(end)]
    tallest = math.log1p(max(counted.counts))
    wide = (counted.high - counted.low) / len(counted.counts)
    bars = []
    for place, count in enumerate(counted.counts):
        if not count:
            continue
        begin = counted.low + place * wide
        inside = low is None or high is None or (begin + wide > low and begin < high)
        tall = max(HEIGHT * 0.92 * math.log1p(count) / tallest, 2.0)
        bars.append(
            tag("rect", x=f"{_place(begin, left, span):.1f}", y=f"{HEIGHT - tall:.1f}", height=f"{tall:.1f}",
                width=f"{max(WIDTH * wide / span * 0.86, 1.5):.2f}", fill="var(--bar)" if inside else "var(--poor)")
        )  # fmt: skip
    drawing = tag("svg", *band, *bars, viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", preserveAspectRatio="none", role="img",
                  aria_label=f"histogram of values from {counted.low:.4g} to {counted.high:.4g}")  # fmt: skip
    ends = tag("div", tag("span", f"{left:.4g}"), tag("span", f"{right:.4g}"), class_="scale")
    return join(tag("div", drawing, class_="histogram"), ends)


def _place(x: float, left: float, span: float) -> float:
    return WIDTH * (x - left) / span


def _edge(x: float) -> Markup:
    return tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=0, y2=HEIGHT, stroke="var(--own)", stroke_width=2,
               vector_effect="non-scaling-stroke")  # fmt: skip
