"""The bar charts of the benchmark pages. Each reads its numbers from a table of a page, so that a number stands once.

A chart names the page, the heading above the table, and columns: `draw` finds them by what the page says, and a column,
row or number that is not there is an error that says what is. drawings.py writes the charts, and a test compares: it
fails where a table changed and its picture did not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sheet import WIDTH, Sheet

ROOT = Path(__file__).parents[2]
HEADING = re.compile(r"(#+) (.*)")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
ASIDE = re.compile(r"\s*(?:\[[^\]]*\]|\([^)]*\))")
INTERVAL = re.compile(r"\[([\d.]+), ([\d.]+)\]")

Row = dict[str, str]
"""A row of a table: the text of each cell by the name of its column."""


def table(page: Path, heading: str, columns: Sequence[str]) -> list[Row]:
    """The rows of the first table below a heading of a Markdown page that has these columns.

    Raises:
        ValueError: the page has no such heading, no such table below it, or two columns of one name.
    """
    for header, rows in _tables(_section(page, heading)):
        if set(columns) <= set(header):
            if len(set(header)) < len(header):
                raise ValueError(f"{page.name}, {heading!r}: two columns of one name among {header}")
            return [dict(zip(header, row, strict=True)) for row in rows]
    found = [header for header, _ in _tables(_section(page, heading))]
    raise ValueError(f"{page.name}, {heading!r}: no table has the columns {list(columns)}; those there have {found}")


def number(cell: str, part: int = 0) -> str | None:
    """The number at the beginning of a cell, as it is written; of "0.81, 1.00" `part` says which. None without one.

    Emphasis, brackets and units are left out: "**1.18** [1.11, 1.25]" is 1.18.
    """
    parts = ASIDE.sub("", cell).replace("*", "").split(", ")
    found = NUMBER.match(parts[part].strip()) if part < len(parts) else None
    return found[0] if found else None


def _section(page: Path, heading: str) -> list[str]:
    """The lines below a heading, up to the next one of its level or above."""
    lines: list[str] = []
    level, fence = 0, False
    headings = []
    for line in page.read_text(encoding="utf-8").splitlines():
        fence ^= line.startswith("```")
        found = None if fence else HEADING.fullmatch(line)
        if found:
            headings.append(found[2])
            if level and len(found[1]) <= level:
                break
            if not level and found[2] == heading:
                level = len(found[1])
        if level:
            lines.append(line)
    if not level:
        raise ValueError(f"{page.name}: no heading {heading!r}; it has {headings}")
    return lines


def _tables(lines: Sequence[str]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Header and rows of each table."""
    block: list[list[str]] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            block.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif block:
            yield block[0], block[2:]
            block = []


@dataclass(frozen=True)
class Series:
    """One bar of every row: the name in the legend, the column, which of a cell's numbers, and the colour."""

    name: str
    column: str
    fill: str
    part: int = 0


@dataclass(frozen=True)
class Chart:
    """A chart of bars, in groups where it has several series.

    Attributes:
        title: what the picture says to those who do not see it, with the unit.
        unit: what a bar's length is, in the picture.
        page, heading: where the table stands.
        label: the column that names the rows.
        series: the bars of a row.
        rows: the rows that are drawn, in this order, each with the words for it; all of them where it is empty.
        line: words at the line of the value 1; none where it is empty.
        absent: what a cell may say in place of a number: it is written where the bar would be, and nothing for "".
        aside: whether brackets behind a number are written with it.
        note: a column whose number stands below the row's name, and its unit.
        across: whether the table has a row for each series, and `rows` are its columns.
    """

    title: str
    unit: str
    page: str
    heading: str
    label: str
    series: tuple[Series, ...]
    rows: Mapping[str, str] = field(default_factory=dict)
    line: str = ""
    absent: tuple[str, ...] = ()
    aside: bool = False
    note: tuple[str, str] | None = None
    across: bool = False


@dataclass(frozen=True)
class Bar:
    """One bar: its length, the words behind it, its colour, and the ends of the interval."""

    value: float
    words: str
    fill: str
    interval: tuple[float, float] | None


def bars(chart: Chart, root: Path = ROOT) -> list[tuple[str, str, list[Bar]]]:
    """For each row its name, the note below it, and its bars.

    Raises:
        ValueError: the table, a column or a row is missing, or a cell has no number and is none of `chart.absent`.
    """
    columns = [*(one.column for one in chart.series), *([chart.note[0]] if chart.note else [])]
    groups = list(chart.rows)
    asked, needed = (groups, columns) if chart.across else (columns, groups)
    lines = table(root / chart.page, chart.heading, [chart.label, *asked])
    rows = {line[chart.label]: line for line in lines}
    if len(rows) < len(lines):
        names = [line[chart.label] for line in lines]
        raise ValueError(f"{chart.page}, {chart.heading!r}: two rows of one name among {names}")
    missing = [name for name in needed if name not in rows]
    if missing:
        raise ValueError(f"{chart.page}, {chart.heading!r}: no rows {missing}; it has {list(rows)}")
    if chart.across:
        rows = {name: {chart.label: name, **{one: rows[one][name] for one in columns}} for name in groups}
    return [
        (
            words,
            f"{_number(chart, rows[name], chart.note[0])} {chart.note[1]}" if chart.note else "",
            [bar for one in chart.series if (bar := _bar(chart, rows[name], one))],
        )
        for name, words in (chart.rows or {name: name for name in rows}).items()
    ]


def _bar(chart: Chart, row: Row, series: Series) -> Bar | None:
    cell = row[series.column]
    if cell in chart.absent:
        return Bar(0.0, cell, "none", None) if cell else None
    text = _number(chart, row, series.column, series.part)
    interval = INTERVAL.search(cell) if series.part == 0 else None
    words = cell.replace("*", "") if chart.aside else text
    ends = (float(interval[1]), float(interval[2])) if interval else None
    return Bar(float(text.replace(",", "")), words, series.fill, ends)


def _number(chart: Chart, row: Row, column: str, part: int = 0) -> str:
    found = number(row[column], part)
    if found is None or found.startswith("-"):
        place = f"{chart.page}, {chart.heading!r}, row {row[chart.label]!r}, column {column!r}"
        which = f"number {part + 1} of the cell" if part else "a number"
        raise ValueError(f"{place}: expected {which}, from 0 on, got {row[column]!r}")
    return found


BAR, GAP = 10.0, 7.0
"""The height of a bar with the space below it, and the space below a row."""


def _width(words: str, size: float) -> float:
    """About the width of words in Helvetica: no font is at hand, and a viewer may have another."""
    narrow, wide = sum(one in " .,;:'()[]ijlft1" for one in words), sum(one.isupper() or one in "mw=%" for one in words)
    return size * (0.57 * len(words) - 0.2 * narrow + 0.15 * wide)


def draw(chart: Chart, root: Path = ROOT) -> Sheet:
    """The chart as a picture, from what the page says now."""
    groups = bars(chart, root)
    legend, top = _legend(chart)
    left = 14 + max(_width(name, 10.5) for name, _, _ in groups)
    after = 8 + max(_width(bar.words, 9) for _, _, row in groups for bar in row if bar.value)
    longest = max(bar.interval[1] if bar.interval else bar.value for _, _, row in groups for bar in row)
    unit = (WIDTH - left - after) / longest
    heights = [max(BAR * len(row), 22.0 if note else 11.0) + GAP for _, note, row in groups]
    bottom = top + sum(heights)
    sheet = Sheet(bottom + (16 if chart.line else 3), chart.title)
    sheet.area(0, 0, WIDTH, sheet.height, fill="paper", round=8)
    sheet.text(8, 16, chart.unit, size=11, fill="soft")
    for x, y, series in legend:
        _swatch(sheet, x, y - 8, 9, 9, series.fill)
        sheet.text(x + 13, y, series.name, size=11, fill="soft")
    y = top
    for (name, note, row), height in zip(groups, heights, strict=True):
        middle = y + (height - GAP) / 2
        sheet.text(left - 6, middle + (-1.0 if note else 3.5), name, size=10.5, anchor="end")
        if note:
            sheet.text(left - 6, middle + 10, note, size=9, fill="soft", anchor="end")
        for place, bar in enumerate(row, 1):
            at = middle - BAR * len(row) / 2 + BAR * (place - 1)
            _draw_bar(sheet, bar, left, at, unit, left + unit if chart.line else 0.0)
        y += height
    if chart.line:
        sheet.line(left + unit, top - 4, left + unit, bottom, stroke="ink", width=1.5)
        sheet.text(left + unit, bottom + 11, chart.line, size=11, anchor="middle")
    return sheet


def _draw_bar(sheet: Sheet, bar: Bar, left: float, top: float, unit: float, line: float) -> None:
    """A bar with its interval, and its words: behind the line where it would cross them."""
    end = left + unit * bar.value
    if bar.value:
        _swatch(sheet, left, top, end - left, BAR - 1, bar.fill)
    if bar.interval:
        low, high = (left + unit * each for each in bar.interval)
        sheet.line(low, top + 4.5, high, top + 4.5, stroke="ink", width=1)
        end = max(end, high)
    if end < line < end + 6 + _width(bar.words, 9):
        end = line
    sheet.text(end + 3, top + 8, bar.words, size=9, fill="soft")


def _swatch(sheet: Sheet, x: float, y: float, width: float, height: float, fill: str) -> None:
    """A bar or its sign in the legend; a pale colour has an edge of the full one."""
    stroke = fill.removesuffix("-fill") if fill.endswith("-fill") else "none"
    sheet.area(x, y, width, height, fill=fill, stroke=stroke)


def _legend(chart: Chart) -> tuple[list[tuple[float, float, Series]], float]:
    """Where the names of the series stand, below the unit, and where the bars begin. One series needs no name."""
    if len(chart.series) == 1:
        return [], 26.0
    places, x, y = list[tuple[float, float, Series]](), 8.0, 33.0
    for series in chart.series:
        width = 25 + _width(series.name, 11)
        if x > 8 and x + width - 12 > WIDTH - 4:
            x, y = 8.0, y + 16
        places.append((x, y, series))
        x += width
    return places, y + 12


SPEED, ACCURACY, BITS = (f"docs/benchmarks/{name}.md" for name in ("speed", "accuracy", "bits"))
TRAINING, ELSEWHERE = (f"docs/benchmarks/{name}.md" for name in ("training", "elsewhere"))
OVER = "its time over ours"

ORT, VINO, VINO4, TORCH = "red", "green", "green-fill", "line"
"""Colours of peers, the same in each chart. Ours is blue."""

OTHERS = (
    Series("ONNX Runtime 4 bits", "ONNX Runtime", ORT), Series("OpenVINO int4", "OpenVINO int4", VINO4),
    Series("OpenVINO int8", "OpenVINO int8", VINO),
)  # fmt: skip
BFLOAT16, OURS_8 = Series("torch bfloat16", "torch bfloat16", TORCH), Series("ours, 8 bits", "ours, 8 bits", "blue")
"""What stands beside ours at 4 bits in the charts of language models."""

DECODES = {
    "32, 1": "32 tokens, one thread", "512, 1": "512, one thread", "2048, 1": "2,048, one thread",
    "32, 2": "32, two threads", "512, 2": "512, two threads", "2048, 2": "2,048, two threads",
}  # fmt: skip
"""Tokens in the cache and threads of a step of decoding."""

CHARTS: dict[str, Chart] = {
    "speed": Chart(
        "Time of a call over Octet's: float, and the fastest other int8 library, on a CPU with VNNI",
        "time of a call over ours", "README.md", "Why not the others", "",
        (Series("float", "float over ours", TORCH), Series("fastest int8 peer", OVER, "red")), line="ours",
    ),
    "speed_avx2": Chart(
        "Time of a call of the fastest peer over Octet's with weights of 8 and of 7 bits, on a CPU with AVX2 alone",
        "fastest peer's time over ours: above 1 ours is faster", SPEED, "AVX2 without VNNI", "case",
        (Series("ours with 8 bits", OVER, "blue"), Series("ours with 7 bits", OVER, "blue-fill", part=1)), line="level",
    ),
    "speed_amx": Chart(
        "Time of a call of the fastest peer over Octet's, on a CPU with AMX",
        "fastest peer's time over ours: above 1 ours is faster", SPEED, "AMX", "case",
        (Series("fastest peer", OVER, "blue"),), line="level",
    ),
    "zoo": Chart(
        "Time of a call in float over int8, one thread: the median of the zoo, networks of timm, and the slowest",
        "float's time over int8's: above 1 int8 is faster", SPEED, "Whole architectures", "architecture",
        (
            Series("Zen 5 (VNNI)", "Zen 5", "blue"), Series("Zen 3 (AVX2)", "Zen 3", "green"),
            Series("Zen 3, over compiled float", "compiled", "green-fill"),
        ), line="float", absent=("",),
    ),
    "signal": Chart(
        "Signal to noise of static int8 outputs in dB, of six models, ours and each peer's",
        "signal to noise in dB: more is better", ACCURACY, "Beside every peer", "model",
        (
            Series("ours", "static", "blue"), Series("ours, equalised", "equalised", "blue-fill"),
            Series("ONNX Runtime", "ONNX Runtime", ORT), Series("NNCF", "NNCF", VINO),
            Series("NNCF, SmoothQuant", "NNCF smooth", VINO4), Series("torchao", "torchao", TORCH),
        ), absent=("", "fails"), aside=True,
    ),
    "outliers": Chart(
        "Signal to noise in dB of models with outliers of activations, ours and two peers', on a CPU without VNNI",
        "signal to noise in dB: more is better", ACCURACY, "Outliers", "model",
        (
            Series("ours", "static", "blue"), Series("ours, 16 bits", "16 bits in all", "blue-fill"),
            Series("ONNX Runtime", "ONNX Runtime", ORT), Series("NNCF, SmoothQuant", "NNCF, SmoothQuant", VINO4),
        ),
    ),
    "bits_lstm": Chart(
        "Time of an LSTM with weights of 8 bits over the time with 4 bits",
        "time of 8 bits over that of 4", BITS, "Recurrent and linear layers", "LSTM",
        (Series("4 bits", "ratio", "blue"), Series("4 bits in groups of 64", "ratio of groups", "blue-fill")),
        line="8 bits",
    ),
    "decode": Chart(
        "Time of a decoding step of each peer over Octet's at 4 bits, and Octet's tokens a second",
        "time over ours at 4 bits: above 1 ours is faster", BITS, "Decode", "tokens, threads",
        (*OTHERS, OURS_8),
        DECODES,
        line="ours", note=("ours, tokens/s", "tokens/s"), across=True,
    ),
    "decode_modules": Chart(
        "Time of a decoding step of each peer over Octet's at 4 bits, module by module, and Octet's tokens a second",
        "time over ours at 4 bits: above 1 ours is faster", BITS, "Module by module", "tokens, threads",
        (*OTHERS, BFLOAT16, OURS_8),
        DECODES, line="ours", note=("ours, tokens/s", "tokens/s"), across=True,
    ),
    "decode_avx2": Chart(
        "Tokens a second of a decoding step, ours and each peer's, on a CPU with AVX2 alone",
        "tokens/s of 16 layers: more is better", BITS, "On AVX2", "contender",
        (Series("tokens/s", "tokens/s of 16 layers", "blue"),),
    ),
    "prefill": Chart(
        "Time of a prompt of each peer over Octet's at 4 bits in one call, and Octet's tokens a second",
        "time over ours at 4 bits: above 1 ours is faster", BITS, "Prefill", "tokens, threads",
        (*OTHERS, BFLOAT16, OURS_8),
        {"32, 2": "32 tokens", "512, 2": "512 tokens", "2048, 2": "2,048 tokens"},
        line="ours", note=("ours, tokens/s", "tokens/s"), across=True,
    ),
    "prefill_amx": Chart(
        "Tokens a second of a prompt, ours and each peer's, on a CPU with AMX",
        "tokens/s of 16 layers: more is better", BITS, "Prefill with tiles", "tokens, threads",
        (
            Series("ours, 4 bits", "ours, 4 bits g64", "blue-fill"),
            Series("ours, 8 bits", "ours, 8 bits", "blue"),
            Series("OpenVINO int4", "OpenVINO int4", VINO4),
            Series("OpenVINO int8", "OpenVINO int8", VINO),
            Series("torch bfloat16", "bfloat16, torch", TORCH),
            Series("torchao int8", "torchao int8", "soft"),
            Series("ONNX Runtime int4", "ONNX Runtime int4", ORT),
        ),
        {
            "512, 2": "512 tokens, two threads", "2048, 2": "2,048, two threads", "512, 1": "512, one thread",
            "2048, 1": "2,048, one thread",
        }, across=True,
    ),
    "calibration": Chart(
        "Time of a forward with observers over float's, ours and torch.ao's",
        "time over float: less is better", TRAINING, "Calibration", "model, CPU",
        (Series("ours", "ours", "blue"), Series("torch.ao", "torch.ao", "red")), line="float",
    ),
    "runner": Chart(
        "Time of a call in the runner over the time in Python, one thread, on two CPUs",
        "time over Python's: less is better", ELSEWHERE, "The runner without Python", "model",
        (Series("Zen 5 (VNNI)", "Zen 5, one thread", "blue"), Series("Zen 3 (AVX2)", "Zen 3, one thread", "green")),
        line="Python",
    ),
    "onnx_files": Chart(
        "Time of ONNX Runtime over ours for int8 ONNX files of other quantisers, one thread, on two CPUs",
        "ONNX Runtime's time over ours: above 1 ours is faster", ELSEWHERE, "ONNX files of others", "file",
        (Series("Zen 5 (VNNI)", "Zen 5, quiet", "blue"), Series("Zen 3 (AVX2)", "Zen 3", "green")), line="level",
    ),
}  # fmt: skip
