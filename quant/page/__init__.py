"""The report as one HTML page: what is int8, which layer hurts, why, and what to do about it.

The page is a single file: it refers to no other, runs no script, and reads as well on a phone as on paper. What it
says comes from `quant.summary`, `quant.compare` and `quant.calibrate.ranges`; nothing is computed here.
"""

from __future__ import annotations

from torch import nn

from quant.calibrate import ranges
from quant.compare import Comparison
from quant.page import sections
from quant.page.markup import Markup, tag
from quant.page.style import CSS
from quant.report import summary


def report_html(
    converted: nn.Module,
    comparison: Comparison | None = None,
    *,
    prepared: nn.Module | None = None,
    title: str = "",
) -> str:
    """One self-contained HTML page about a quantised model.

    Args:
        converted: from `convert`, `quantize_static`, `quantize_dynamic` or `load`.
        comparison: from `quant.compare`; without it the page has no errors and no histograms.
        prepared: the prepared model that `converted` comes from; adds the suspicions of calibration.
        title: of the page; the model's class where it is empty.

    Raises:
        TypeError: `comparison` is something else.
    """
    if comparison is not None and not isinstance(comparison, Comparison):
        raise TypeError(
            f"quant.report_html: comparison is a {type(comparison).__name__}, expected what "
            "quant.compare(model, converted, batches) gives, or None"
        )
    name = title or type(converted).__name__
    report = summary(converted)
    rows = ranges(prepared) if prepared is not None else []
    body = tag(
        "main",
        sections.head(name, report, comparison),
        None if comparison is None else sections.advice(comparison),
        None if comparison is None else sections.through(comparison),
        None if comparison is None else sections.layers(comparison, report),
        sections.suspicions(rows),
        sections.modules(report),
        sections.guide(comparison),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{name} in int8"),
        tag("style", Markup(CSS)),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", body), lang="en") + "\n"


__all__ = ["report_html"]
