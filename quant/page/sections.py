"""The sections of the page: each a function from a report or comparison to markup."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quant.calibrate import Row
from quant.compare import Comparison
from quant.diagnosis import HEALTHY
from quant.error_parts import StepError, percent
from quant.page.charts import error_through, histogram, share
from quant.page.markup import Markup, join, tag
from quant.report import Report, ReportEntry

POOR = 20.0
"""dB under which a step's own error is a tenth of its signal or more."""

OPEN = 3
"""Layers whose details are shown without asking."""

LISTED = 24
"""Layers that are listed at once; the others unfold."""

NAMED = 5
"""Layers that the advice names."""


def head(name: str, report: Report, comparison: Comparison | None) -> Markup:
    """Title, one sentence, and the numbers to remember."""
    before, after = report.model_bytes_before, report.model_bytes_after
    tiles = [
        _tile(f"{len(report.quantized)} of {len(report)}", "modules in int8"),
        _tile(_bytes(after), f"of parameters, from {_bytes(before)}"),
    ]
    if comparison is not None:
        last = comparison[comparison.order[-1]]
        worst = comparison.steps[0]
        tiles.append(_tile(_decibels(last.sqnr), f"SQNR at the output, cosine {last.cosine:.5f}"))
        tiles.append(_tile(_error(worst.own_sqnr), f"error added by {worst.name}", _grade(worst.own_sqnr)))
    sentence = "What became of each layer of the float model, what it costs in accuracy, and what to do about it."
    return join(tag("h1", f"{name} in int8"), tag("p", sentence, class_="soft"), tag("div", *tiles, class_="tiles"))


def _tile(number: str, what: str, grade: str | None = None) -> Markup:
    return tag("div", tag("b", number, class_=grade), tag("span", what), class_="tile")


def advice(comparison: Comparison) -> Markup:
    """The layers that hurt, with what to try."""
    bad = [step for step in comparison.steps if step.own_sqnr <= HEALTHY]
    if not bad and not comparison.unreached and not comparison.outside:
        healthy = f"Every step adds less error than {HEALTHY:.0f} dB. Nothing needs attention."
        return join(tag("h2", "What to do"), tag("p", healthy))
    advice = [_todo(step) for step in bad[:NAMED]]
    more = len(bad) - NAMED
    rest = tag("p", f"And {more} more, below.", class_="note") if more > 0 else None
    lost = ", ".join(comparison.unreached)
    silent = f"No batch reached {lost}: never calibrated, or not called by this data. Nothing is known of their error."
    others = ", ".join(comparison.outside)
    unlike = (
        f"Calls of {others} that no captured program stands for are not compared: quant.prepare takes examples=[...]."
    )
    return join(
        tag("h2", "What to do"),
        tag("p", "The steps that add most error of their own. Change one, and look again.", class_="soft"),
        *advice,
        rest,
        tag("div", silent, class_="todo fair") if comparison.unreached else None,
        tag("div", unlike, class_="todo fair") if comparison.outside else None,
    )


def _todo(step: StepError) -> Markup:
    return tag(
        "div",
        tag("p", tag("strong", step.name, class_="name"), f" adds an error of {_error(step.own_sqnr)} of its signal"),
        tag("p", _sentence(step.cause), f" {_sentence(step.advice)}" if step.advice else None),
        _rule(step),
        class_=f"todo {_grade(step.own_sqnr)}",
    )


def _rule(step: StepError) -> Markup | None:
    """The line to put in a recipe."""
    return tag("p", tag("code", f"quant.Recipe({{{step.rule}}})")) if step.rule else None


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def through(comparison: Comparison) -> Markup:
    """Error from the input to the output."""
    steps = [comparison[name] for name in comparison.order]
    text = "From the input, left, to the output, right. A long bar is a step that adds error; the line falls after it."
    key = tag("div", tag("span", "added by the step (the longer, the more)", style="--c:var(--own)"),
              tag("span", "SQNR with all error before it", style="--c:var(--poor)"), class_="key")  # fmt: skip
    ends = tag("div", tag("span", steps[0].name, class_="name note"), tag("span", steps[-1].name, class_="name note"),
               class_="ends")  # fmt: skip
    return join(tag("h2", "Error through the network"), tag("p", text, class_="soft"), key, error_through(steps), ends)


def layers(comparison: Comparison, report: Report) -> Markup:
    """Every step, the one that adds most error first."""
    entries = {entry.name: entry for entry in report}
    cards = [_layer(step, entries.get(step.name.split("@")[0]), place < OPEN) for place, step in enumerate(comparison)]
    text = "The error that each step adds, as a share of its signal. Open one for its values and their int8 range."
    return join(
        tag("h2", "Layers, worst first"), tag("p", text, class_="soft"), *cards[:LISTED], _folded(cards[LISTED:])
    )


def _folded(cards: Sequence[Markup]) -> Markup | None:
    if not cards:
        return None
    return tag("details", tag("summary", f"{len(cards)} more, which add less"), tag("div", *cards, class_="inside"))


def _layer(step: StepError, entry: ReportEntry | None, shown: bool) -> Markup:
    grade = _grade(step.own_sqnr)
    meter = tag("span", tag("span", style=f"width:{100 - 100 * share(step.own_sqnr):.0f}%"), class_=f"meter {grade}")
    line = tag(
        "summary",
        tag("span", step.name, class_="name"),
        tag("span", _error(step.own_sqnr), class_=f"own {grade}"),
        meter,
        tag("span", step.cause or step.kind, class_="why"),
    )
    clipped = percent(step.clipped) if step.low is not None else "float output"
    facts = [
        ("kind", step.kind),
        ("own SQNR", _decibels(step.own_sqnr)),
        ("SQNR with all before", _decibels(step.sqnr)),
        ("cosine", f"{step.cosine:.6f}"),
        ("clipped", clipped),
    ]
    if step.low is not None and step.high is not None:
        facts.append(("int8 range", f"{step.low:.4g} to {step.high:.4g}"))
    if step.histogram is not None:
        facts.append(("values seen", f"{step.histogram.low:.4g} to {step.histogram.high:.4g}"))
    described = [tag("p", _sentence(step.advice)), _rule(step)] if step.advice else []
    if entry is not None:
        described.append(tag("p", f"{entry.outcome}: {entry.detail}", class_="note"))
    drawn = [] if step.histogram is None else [histogram(step.histogram, step.low, step.high)]
    inside = tag("div", *drawn, _facts(facts), *described, class_="inside")
    return tag("details", line, inside, open="" if shown else None)


def _facts(facts: Sequence[tuple[str, str]]) -> Markup:
    return tag("dl", *(tag("div", tag("dt", what), tag("dd", value)) for what, value in facts), class_="facts")


def suspicions(rows: Sequence[Row]) -> Markup | None:
    """The layers that calibration warns of, with its warnings."""
    doubtful = [row for row in rows if row.warnings]
    if not doubtful:
        return None
    layers = [tag("div", tag("p", tag("span", row.layer or "(root)", class_="name")), *(tag("p", text) for text in
            row.warnings), class_="todo fair") for row in doubtful]  # fmt: skip
    return join(tag("h2", "Suspicions of calibration"), *layers)


def modules(report: Report) -> Markup:
    """The report of the conversion."""
    rows = [
        tag(
            "tr",
            tag("td", entry.name or "(root)", class_="name"),
            tag("td", entry.outcome, class_="" if entry.quantized else "fair"),
            tag("td", entry.type, class_="type soft"),
            tag("td", f"{_bytes(entry.bytes_before)} → {_bytes(entry.bytes_after)}", class_="number"),
            tag("td", entry.detail, class_="why"),
        )
        for entry in report
    ]
    words = {"module": None, "now": None, "type": None, "bytes": "number", "how, or why not": None}
    names = [tag("th", word, class_=look) for word, look in words.items()]
    table = tag("table", tag("thead", tag("tr", *names)), tag("tbody", *rows))
    left = sum(not entry.quantized for entry in report)
    text = f"{len(report.quantized)} modules compute in integers, {left} stay in float, for the reason beside them."
    return join(tag("h2", "What is int8, what is float, and why"), tag("p", text, class_="soft"), table)


def guide(comparison: Comparison | None) -> Markup | None:
    """How to read the numbers."""
    if comparison is None:
        return None
    lines = [
        "SQNR is the signal's power over the error's, in dB: at 40 dB the error is a hundredth of the signal, at 20 dB "
        "a tenth, at 0 dB as large as the signal. The error is that of the real integer arithmetic.",
        "What a step adds (own) is measured against float arithmetic on the very integers that the step got: it holds "
        "no error of the steps before. Change the layer that adds most, not the one where most has arrived.",
        "In histograms the shaded band is the range of the 256 integers; red bars lie outside it and are clipped. "
        "Heights are logarithms of counts, so that few outliers are seen as well.",
    ]
    return join(tag("h2", "How to read this"), *(tag("p", line) for line in lines))


def _grade(decibels: float) -> str:
    return "good" if decibels > HEALTHY else "fair" if decibels > POOR else "poor"


def _error(decibels: float) -> str:
    """The error as a share of the signal."""
    return "no error" if decibels == math.inf else percent(10 ** (-max(decibels, -60.0) / 20))


def _decibels(value: float) -> str:
    if math.isinf(value):
        return "no error" if value > 0 else "all error"
    return f"{value:.1f} dB"


def _bytes(count: int) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
