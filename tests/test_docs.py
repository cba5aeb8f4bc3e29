"""The documentation site: its drawings are what the script draws, and its reference has every public name."""

from __future__ import annotations

import datetime
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import quant

DOCS = Path(__file__).parents[1] / "docs"
MODULES = ("quant", "quant.calibrate", "quant.kernels", "quant.nn", "quant.observers", "quant.types")
OfTheSite = Callable[[str], ModuleType]


@pytest.fixture
def of_the_site(monkeypatch: pytest.MonkeyPatch) -> OfTheSite:
    """Import a script of docs/site/, which is in no package, the way it is run: from its own folder."""
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    return importlib.import_module


def test_the_drawings_are_drawn_by_the_script(of_the_site: OfTheSite) -> None:
    drawn = {name: str(make()) for name, make in of_the_site("drawings").DRAWINGS.items()}
    stored = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "drawings").glob("*.svg")}
    assert sorted(drawn) == sorted(stored)
    assert [name for name in drawn if drawn[name] != stored[name]] == [], "run `make drawings`"


def test_every_drawing_is_on_a_page(of_the_site: OfTheSite) -> None:
    shown = {
        name for page in DOCS.glob("**/*.md") for name in re.findall(r"^```{drawing} (\w+)$", page.read_text(), re.M)
    }
    assert shown == set(of_the_site("drawings").DRAWINGS)


def test_a_release_is_in_the_changelog_with_its_notes() -> None:
    """The newest section is the version's, or is for what comes after it; a release has notes of the same day."""
    changelog = (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    released = dict(re.findall(r"^## \[(\S+)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE))
    assert set(headings) - {f"[{version}] - {day}" for version, day in released.items()} <= {"Unreleased"}
    newest = "Unreleased" if ".dev" in quant.__version__ else f"[{quant.__version__}] - "
    assert headings[0].startswith(newest)
    assert {path.stem for path in (DOCS / "releases").glob("*.md")} == set(released)
    for version, day in released.items():
        notes = (DOCS / "releases" / f"{version}.md").read_text(encoding="utf-8").splitlines()
        assert notes[0] == f"# Release {version}"
        date = datetime.date.fromisoformat(day)
        assert notes[2].startswith(f"{date.day} {date:%B} {date.year}. ")


@pytest.mark.parametrize("name", MODULES)
def test_the_reference_has_every_public_name(name: str) -> None:
    module = importlib.import_module(name)
    page = (DOCS / "reference" / f"{name.removeprefix('quant.')}.md").read_text()
    public = [each for each in module.__all__ if not inspect.ismodule(getattr(module, each))]
    named = set(re.findall(r"\w+", page))
    assert [each for each in public if each not in named] == []


def test_the_reference_describes_what_it_names() -> None:
    """Each public class and function once, where it is public first."""
    described = re.findall(
        r"^\.\. auto(?:function|class|exception):: ([\w.]+)$",
        "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md"))),
        re.MULTILINE,
    )
    objects = [getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in described]
    assert len(set(map(id, objects))) == len(objects)
    wanted = [
        getattr(importlib.import_module(name), each)
        for name in MODULES
        for each in importlib.import_module(name).__all__
    ]
    missing = {
        each.__name__ for each in wanted if inspect.isroutine(each) or inspect.isclass(each) if each not in objects
    }
    assert missing == set()


def test_no_link_of_a_page_leads_out_of_the_documentation_or_nowhere(of_the_site: OfTheSite) -> None:
    assert of_the_site("links").faults(DOCS) == []


def test_links_that_the_site_cannot_have_are_named_with_file_and_line(of_the_site: OfTheSite, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / "guides").mkdir(parents=True)
    (tmp_path / "kernels").mkdir()
    for file in ("README.md", "kernels/README.md", "docs/start.md"):
        (tmp_path / file).write_text("A page.\n")
    (docs / "index.md").write_text(
        "[README](../README.md), [start](start.md#begin), [web](https://a.org/../b), [here](#a), `[a](../code.md)`\n"
        "```python\ntable[0](../code)\n```\n"
        "[kernels](../kernels/README.md) and ![gone](gone.png)\n\n"
        "[by name]: ../kernels/README.md\n"
    )
    (docs / "guides" / "one.md").write_text("```{note}\n[start](../start.md)\n[README](../../README.md)\n```\n")
    out = "leads out of docs/, expected a page: name the file in backquotes instead"
    assert of_the_site("links").faults(docs) == [
        f"docs/guides/one.md:3: the link to ../../README.md {out}",
        f"docs/index.md:5: the link to ../kernels/README.md {out}",
        "docs/index.md:5: the link to gone.png leads to no file",
        f"docs/index.md:7: the link to ../kernels/README.md {out}",
    ]


PAGE = """# Speed

| case | other |
|---|---|
| above | 1.0 |

## One thread

```sh
# One thread of comments
```

| case | ours | its time over ours | notes |
|---|---|---|---|
| LSTM | 3.59, 2.94 ms | **0.81**, 1.00 | 38.8 (28 %) |
| GRU | 1,276 us | 1.68 [1.50, 1.75] | fails |

### Below

| case | its time over ours | ours |
|---|---|---|
| CNN | -1 | |

## Two threads

| case | ours | ours |
|---|---|---|

## Across

| case | 32, 1 | 512, 1 |
|---|---|---|
| ours | 40.8 | 31.9 |
| its time over ours | 1.14 | 1.15 |

## Twice

| case | ours | its time over ours |
|---|---|---|
| LSTM | 1 | 2 |
| LSTM | 3 | 4 |
"""


@pytest.fixture
def chart(of_the_site: OfTheSite, tmp_path: Path) -> Any:
    """A chart of the page above, which lies in `tmp_path`."""
    charts = of_the_site("charts")
    (tmp_path / "speed.md").write_text(PAGE)
    series = (charts.Series("ours", "ours", "blue"), charts.Series("peer", "its time over ours", "red"))
    return charts.Chart("Time in ms", "ms", "speed.md", "One thread", "case", series)


def test_a_chart_has_the_numbers_of_the_table(of_the_site: OfTheSite, chart: Any, tmp_path: Path) -> None:
    charts = of_the_site("charts")
    assert charts.bars(chart, tmp_path) == [
        ("LSTM", "", [charts.Bar(3.59, "3.59", "blue", None), charts.Bar(0.81, "0.81", "red", None)]),
        ("GRU", "", [charts.Bar(1276.0, "1,276", "blue", None), charts.Bar(1.68, "1.68", "red", (1.5, 1.75))]),
    ]


def test_a_chart_takes_rows_parts_and_words(of_the_site: OfTheSite, chart: Any, tmp_path: Path) -> None:
    charts = of_the_site("charts")
    series = (charts.Series("peer", "its time over ours", "red", part=1), charts.Series("dB", "notes", "blue"))
    chosen = replace(chart, series=series, rows={"LSTM": "the LSTM"}, aside=True, note=("ours", "ms"))
    both = [charts.Bar(1.0, "0.81, 1.00", "red", None), charts.Bar(38.8, "38.8 (28 %)", "blue", None)]
    assert charts.bars(chosen, tmp_path) == [("the LSTM", "3.59 ms", both)]
    absent = replace(chart, series=series[1:], rows={"GRU": "GRU"}, absent=("fails",))
    assert charts.bars(absent, tmp_path) == [("GRU", "", [charts.Bar(0.0, "fails", "none", None)])]


def test_a_table_may_have_a_row_for_each_series(of_the_site: OfTheSite, chart: Any, tmp_path: Path) -> None:
    charts = of_the_site("charts")
    columns = {"512, 1": "512 tokens", "32, 1": "32 tokens"}
    turned = replace(chart, heading="Across", rows=columns, across=True, note=("ours", "tokens/s"))
    assert charts.bars(turned, tmp_path) == [
        (
            "512 tokens",
            "31.9 tokens/s",
            [charts.Bar(31.9, "31.9", "blue", None), charts.Bar(1.15, "1.15", "red", None)],
        ),
        ("32 tokens", "40.8 tokens/s", [charts.Bar(40.8, "40.8", "blue", None), charts.Bar(1.14, "1.14", "red", None)]),
    ]


def test_a_picture_changes_with_its_table(of_the_site: OfTheSite, chart: Any, tmp_path: Path) -> None:
    charts = of_the_site("charts")
    before = str(charts.draw(chart, tmp_path))
    assert ">0.81<" in before
    assert 'aria-label="Time in ms"' in before
    (tmp_path / "speed.md").write_text(PAGE.replace("0.81", "0.82"))
    assert str(charts.draw(chart, tmp_path)) != before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heading": "Gone"}, r"speed.md: no heading 'Gone'; it has \['Speed', 'One thread', 'Below', 'Two"),
        ({"label": "model"}, r"no table has the columns \['model', 'ours', .*; those there have \[\['case', 'ours'"),
        ({"heading": "Two threads", "series": ()}, "two columns of one name among"),
        ({"rows": {"CNN": "CNN"}}, r"speed.md, 'One thread': no rows \['CNN'\]; it has \['LSTM', 'GRU'\]"),
        ({"heading": "Twice"}, r"two rows of one name among \['LSTM', 'LSTM'\]"),
        ({"heading": "Across", "across": True, "rows": {"64, 1": ""}}, r"no table has the columns .*'64, 1'"),
        ({"heading": "Across", "across": True, "rows": {"32, 1": ""}, "note": ("2", "")}, r"no rows \['2'\]; it has"),
        ({"note": ("notes", "dB")}, "row 'GRU', column 'notes': expected a number, from 0 on, got 'fails'"),
        ({"heading": "Below"}, "row 'CNN', column 'ours': expected a number, from 0 on, got ''"),
    ],
    ids=["heading", "column", "repeated", "row", "rows", "across", "series", "words", "empty"],
)  # fmt: skip
def test_what_a_chart_cannot_find_is_named(
    of_the_site: OfTheSite, chart: Any, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        of_the_site("charts").draw(replace(chart, **settings), tmp_path)


@pytest.mark.parametrize(
    ("cell", "part", "message"),
    [("-1", 0, "got '-1'"), ("0.81", 1, "expected number 2 of the cell, from 0 on, got '0.81'")],
    ids=["negative", "part"],
)
def test_a_cell_without_its_number_is_named(
    of_the_site: OfTheSite, chart: Any, tmp_path: Path, cell: str, part: int, message: str
) -> None:
    charts = of_the_site("charts")
    (tmp_path / "speed.md").write_text(PAGE.replace("**0.81**, 1.00", cell))
    peer = charts.Series("peer", "its time over ours", "red", part)
    with pytest.raises(ValueError, match=f"row 'LSTM', column 'its time over ours': .*{message}"):
        charts.draw(replace(chart, series=(peer,), rows={"LSTM": "LSTM"}), tmp_path)
