"""The documentation site: its drawings are what the script draws, and its reference has every public name."""

from __future__ import annotations

import datetime
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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
