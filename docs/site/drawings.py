"""Draws the pictures of the documentation: docs/drawings/*.svg. Run it after a change here; a test compares.

Numbers are computed, by the equations of kernels/README.md or by the observers themselves. The charts of the benchmark
pages, which read their numbers from the pages' tables, are in charts.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from quant.observers import make_observer

import charts
from sheet import Sheet

OUT = Path(__file__).parents[1] / "drawings"


def jobs() -> Sheet:
    sheet = Sheet(330, "Three ways from a float model to an int8 model: no data, calibration data, or training")
    sheet.box(90, 4, 180, 36, ["your float model"], size=13)
    columns = [
        (2, "no data", ["`quantize_dynamic"], ["ranges per row,", "at run time"], "blue"),
        (124, "some samples", ["`prepare", "`calibrate.run", "`convert"], ["ranges from", "calibration"], "green"),
        (246, "your loop", ["`prepare_qat", "train", "`convert"], ["ranges from", "training"], "red"),
    ]
    for x, needs, verbs, ranges, kind in columns:
        middle = x + 56
        sheet.arrow([(180, 40), (180, 54), (middle, 54), (middle, 84)] if middle != 180 else [(180, 40), (180, 84)])
        sheet.area(middle - 45, 59, 90, 16, fill="paper", round=3)
        sheet.text(middle, 71, needs, size=11, fill="soft", anchor="middle")
        fill, stroke = f"{kind}-fill", kind
        sheet.area(x, 84, 112, 106, fill=fill, stroke=stroke, round=6)
        for place, words in enumerate(verbs):
            top = 128 - 9 * (len(verbs) - 1) - 8
            words, code = words.removeprefix("`"), words.startswith("`")
            sheet.text(middle, top + 18 * place, words, size=10, anchor="middle", code=code)
        for place, words in enumerate(ranges):
            sheet.text(middle, 166 + 14 * place, words, size=11, anchor="middle", fill="soft")
        sheet.arrow([(middle, 190), (middle, 216)])
    sheet.box(
        2,
        216,
        356,
        44,
        ["int8 model: same classes, names and calls", "a report says what became of each module"],
        size=12,
    )
    sheet.arrow([(91, 260), (91, 286)])
    sheet.arrow([(269, 260), (269, 286)])
    sheet.box(2, 286, 172, 40, ["runs", "x86-64 and ARM, exact sums"], size=10.5)
    sheet.box(186, 286, 172, 40, ["saves", "safetensors, no pickle"], size=10.5)
    return sheet


def numbers() -> Sheet:
    """Equations 2 to 4 with 16 integers, few enough to be drawn, for the range [-1, 3]."""
    sheet = Sheet(176, "Sixteen integers on the line of real numbers: scale, zero point, and how one value is rounded")
    low, high, top = -1.0, 3.0, 15
    scale = high / top - low / top
    zero = min(max(round(-low / scale), 0), top)
    x = 1.72
    q = min(max(round(x / scale) + zero, 0), top)

    def place(real: float) -> float:
        return 14 + (real + 1.2) * (332 / 4.4)

    sheet.text(14, 16, "real numbers", size=11, fill="soft")
    sheet.area(place(low), 62, place(high) - place(low), 12, fill="blue-fill")
    sheet.text(place(low), 58, "-1", size=11, anchor="middle", fill="blue")
    sheet.text(place(high), 58, "3", size=11, anchor="middle", fill="blue")
    sheet.line(10, 74, 350, 74, stroke="ink")
    for integer in range(top + 1):
        at = place(scale * (integer - zero))
        tall = integer in (0, zero, q, top)
        sheet.line(at, 74, at, 88 if tall else 82, stroke="ink", width=2 if integer == zero else 1.2)
        if tall:
            sheet.text(at, 101, str(integer), size=11, anchor="middle", bold=integer == zero)
    sheet.text(place(0.0), 58, "0", size=11, anchor="middle", bold=True)
    sheet.text(place(x), 30, f"x = {x}", size=12, anchor="middle", fill="red")
    sheet.arrow([(place(x), 36), (place(x), 72)], stroke="red")
    sheet.text(14, 118, "integers q", size=11, fill="soft")
    sheet.text(14, 138, f"scale = 4 / 15 = {scale:.4f}, zero_point = {zero}", size=12, code=True)
    sheet.text(14, 155, f"q = round({x} / scale) + {zero} = {q}", size=12, code=True)
    sheet.text(14, 172, f"back: scale * ({q} - {zero}) = {scale * (q - zero):.2f}", size=12, code=True)
    return sheet


def ranges() -> Sheet:
    """Ten thousand values with a few outliers, and the ranges that observers choose for them."""
    draw = random.Random(0)
    values = [draw.gauss(0.6, 1.0) for _ in range(9990)] + [draw.uniform(7.0, 12.0) for _ in range(10)]
    observers = {
        "minmax": make_observer("minmax"),
        "percentile, 99.8": make_observer("percentile", percentile=99.8),
        "histogram": make_observer("histogram"),
    }
    sheet = Sheet(220, "A histogram of values with a few outliers, and the ranges that three observers choose")
    first, last, bars = -4.0, 12.5, 66

    def place(real: float) -> float:
        return 6 + (real - first) * (348 / (last - first))

    counts = [0] * bars
    for value in values:
        counts[min(int((value - first) / (last - first) * bars), bars - 1)] += 1
    for bar, count in enumerate(counts):
        if count:
            height = max(84 * count / max(counts), 1.5)
            sheet.area(place(first) + bar * 348 / bars, 100 - height, 348 / bars - 0.6, height, fill="blue")
    sheet.line(6, 100, 354, 100, stroke="ink")
    for real in (0, 5, 10):
        sheet.text(place(real), 114, str(real), size=11, anchor="middle", fill="soft")
    sheet.text(place(9.5), 90, "10 values of 10,000", size=11, anchor="middle", fill="soft")
    for row, (name, observer) in enumerate(observers.items()):
        observer(torch.tensor(values))
        known = observer.qparams()
        low = float(known.scale) * (0 - int(known.zero_point))
        high = float(known.scale) * (255 - int(known.zero_point))
        y = 124 + 34 * row
        sheet.area(place(low), y, place(high) - place(low), 9, fill="green-fill", stroke="green", round=2)
        words = f"{name}: [{low:.2f}, {high:.2f}], a step is {float(known.scale):.3f}"
        sheet.text(6, y + 21, words, size=11)
    return sheet


def saturation() -> Sheet:
    sheet = Sheet(301, "Two products of a byte and an int8 weight overflow 16 bits; four exact ways")
    full, limit = 2 * 255 * 127, 32767

    def wide(value: float) -> float:
        return 340 * value / full

    sheet.text(8, 18, f"255 * 127 + 255 * 127 = {full:,}", size=12, code=True)
    sheet.area(8, 26, wide(limit), 20, fill="blue-fill", stroke="blue")
    sheet.area(8 + wide(limit), 26, wide(full - limit), 20, fill="red-fill", stroke="red")
    sheet.text(8 + wide(limit) / 2, 40, f"int16 holds {limit:,}", size=11, anchor="middle", fill="blue")
    sheet.text(
        8 + wide(limit) + wide(full - limit) / 2, 40, "vpmaddubsw loses this", size=11, anchor="middle", fill="red"
    )
    sheet.text(8, 72, "each weight is looked at when it is packed", size=12, bold=True)
    rows = [
        ("pairwise", "each pair's positive parts sum to 128 at", "most, and its negative parts: it fits as it is"),
        ("signed", "magnitudes of x - 128 by weights with its", "sign: no pair is above 2 * 128 * 127 (ours)"),
        ("wide", "bytes become int16 first; products are", "added in 32 bits (our own kernels)"),
        ("split", "w = clamp(w, -64, 64) + rest: two weights", "that fit (where a library's kernel is used)"),
        ("vnni", "the CPU adds four products in 32 bits:", "nothing can saturate"),
    ]
    for row, (name, first, second) in enumerate(rows):
        y = 84 + 43 * row
        sheet.area(8, y, 70, 34, fill="green-fill", stroke="green", round=6)
        sheet.text(43, y + 21, name, size=12, anchor="middle", code=True)
        sheet.text(88, y + 14, first, size=11.5)
        sheet.text(88, y + 29, second, size=11.5)
    return sheet


def plan() -> Sheet:
    sheet = Sheet(236, "Steps called from Python one by one, and the same steps as one native call")
    steps = ["quantize", "conv", "conv", "add", "pool", "linear"]
    sheet.text(6, 16, "one by one: a call from Python for each", size=12, bold=True)
    for place, step in enumerate(steps):
        x = 6 + place * 59
        sheet.area(x, 26, 53, 18, fill="red-fill", stroke="red", round=4)
        sheet.text(x + 26.5, 39, "Python", size=10, anchor="middle")
        sheet.arrow([(x + 26.5, 44), (x + 26.5, 56)])
        sheet.area(x, 56, 53, 22, fill="blue-fill", stroke="blue", round=4)
        sheet.text(x + 26.5, 71, step, size=10, anchor="middle")
    sheet.text(6, 108, "planned: one call, C++ runs the steps", size=12, bold=True)
    sheet.area(6, 118, 53, 18, fill="red-fill", stroke="red", round=4)
    sheet.text(32.5, 131, "Python", size=10, anchor="middle")
    sheet.arrow([(32.5, 136), (32.5, 148)])
    sheet.area(2, 148, 356, 30, fill="none", stroke="line", round=6)
    for place, step in enumerate(steps):
        x = 6 + place * 58.4
        sheet.area(x, 152, 56, 22, fill="blue-fill", stroke="blue", round=4)
        sheet.text(x + 28, 167, step, size=10, anchor="middle")
    sheet.text(6, 198, "buffers", size=11, fill="soft")
    for x, y, width in ((60, 186, 116), (122, 204, 116), (180, 186, 116), (240, 204, 114)):
        sheet.area(x, y, width, 12, fill="green-fill", stroke="green", round=2)
    sheet.text(6, 230, "values that are not alive at once share memory", size=11, fill="soft")
    return sheet


def capture() -> Sheet:
    sheet = Sheet(
        392, "How a captured graph is proved: two recordings, a run of the graph, and a run that nobody records"
    )
    rows = [
        (["record the forward", "on your example"], "a graph of its calls", "soft"),
        (["record it again", "other values and sizes"], "other calls or constants?", "red"),
        (["run the graph", "on the second inputs"], "another bit in the output?", "red"),
        (["run your forward", "with nobody recording"], "another output?", "red"),
    ]
    for row, (lines, answer, tint) in enumerate(rows):
        y = 4 + 84 * row
        sheet.box(2, y, 160, 50, lines, kind="blue")
        sheet.arrow([(82, y + 50), (82, y + 84)])
        if row:
            sheet.text(90, y + 71, "no", size=11, fill="soft")
            sheet.text(172, y + 14, answer, size=11, fill=tint)
            sheet.arrow([(162, y + 25), (196, y + 25)], stroke="red")
            sheet.text(166, y + 39, "yes", size=11, fill="red")
        else:
            sheet.text(172, y + 29, answer, size=11.5, fill=tint)
    actions = [
        ["island: the smallest module", "that differs, or a size guard"],
        ["island: it runs as it is,", "its layers are captured alone"],
        ["island: the forward", "noticed the recording"],
    ]
    for row, words in enumerate(actions):
        y = 88 + 84 * row
        sheet.area(196, y + 18, 162, 34, fill="red-fill", stroke="red", round=6)
        for place, part in enumerate(words):
            sheet.text(277, y + 32 + 14 * place, part, size=10, anchor="middle")
    sheet.box(2, 340, 160, 46, ["the graph is believed", "int8 is made of it"], kind="green", size=11)
    return sheet


def trouble() -> Sheet:
    sheet = Sheet(600, "A decision tree for an int8 model that is less accurate than the float model")
    rows = [
        (["Does quant.parity", "hold?"], "no", ["a defect of ours:", "please report it"], "red"),
        (
            ["Is calibration data", "like the real data?"],
            "no",
            ["calibrate on inputs as", "prepared for the float model"],
            "green",
        ),
        (["Warnings, or layers", "that stay float?"], "yes", ["read the reason:", "quant.summary(q)"], "green"),
        (["quant.compare:", "is one step far worse?"], "no", ["many small errors:", "train with prepare_qat"], "green"),
        (["Cause:", "clipping?"], "yes", ["minmax or percentile", "for that layer; more data"], "green"),
        (
            ["Cause: rounding", "of the weights?"],
            "yes",
            ["weight_bits=8, per_channel,", 'weight_observer="mse"'],
            "green",
        ),
        (["Cause: outliers or", "range spread?"], "yes", ["None: leave it float;", "or scale channels alike"], "green"),
    ]
    for row, (question, answer, action, kind) in enumerate(rows):
        y = 4 + 78 * row
        other = "no" if answer == "yes" else "yes"
        sheet.box(2, y, 152, 46, question, kind="blue", size=11.5)
        sheet.arrow([(154, y + 23), (190, y + 23)])
        sheet.text(160, y + 17, answer, size=11, fill="soft")
        sheet.area(190, y, 168, 46, fill=f"{kind}-fill", stroke=kind, round=6)
        for place, words in enumerate(action):
            sheet.text(274, y + 20 + 15 * place, words, size=10.5, anchor="middle")
        sheet.arrow([(78, y + 46), (78, y + 78)])
        sheet.text(86, y + 66, other, size=11, fill="soft")
    sheet.box(2, 550, 152, 46, ["Try another recipe", "or train: prepare_qat"], kind="blue", size=11.5)
    return sheet


DRAWINGS: dict[str, Callable[[], Sheet]] = {
    **{one.__name__: one for one in (jobs, numbers, ranges, saturation, plan, capture, trouble)},
    **{name: partial(charts.draw, chart) for name, chart in charts.CHARTS.items()},
}

if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for name, make in DRAWINGS.items():
        (OUT / f"{name}.svg").write_text(str(make()), encoding="utf-8")
