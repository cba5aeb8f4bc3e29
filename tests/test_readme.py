"""What the documents show is run: every `python` block, and every `quant` line of a `console` block with its output.

The blocks of one document share a namespace and a folder, and run in order. A python block that begins with a comment
like `# tagger.py` is also written to that file, so that a command can import it. A `text` block is what the python
block before it prints; `...` stands for any text. Blocks whose fence goes on with `needs=timm` run by themselves, where
that library is installed.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(CHECKOUT).as_posix()
    for pattern in ("README.md", "docs/**/*.md", "*/README.md")
    for path in CHECKOUT.glob(pattern)
    if not path.relative_to(CHECKOUT).parts[0].startswith(".")
)
FENCE = re.compile(r"^```(\w*)(?: needs=(\w+))?[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
ELLIPSIS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line of the document on which the text begins, and the library that
    it needs beyond those of the tests."""

    language: str
    text: str
    line: int
    needs: str = ""


def blocks(text: str) -> list[Block]:
    return [Block(m[1], m[3], text.count("\n", 0, m.start(3)) + 1, m[2] or "") for m in FENCE.finditer(text)]


def run_python(block: Block, document: str, namespace: dict[str, Any]) -> str:
    """What the block prints."""
    first = re.match(r"# (\w+\.py)\n", block.text)
    if first:
        Path(first[1]).write_text(block.text)
    # Blank lines in front, so that a traceback names the document's own line.
    code = compile("\n" * (block.line - 1) + block.text, document, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, namespace)
    return printed.getvalue()


def check_output(expected: str, printed: str, shown: str) -> None:
    """Fail with the difference where `printed` is not as expected; `shown` says of what it is the output."""
    if not doctest.OutputChecker().check_output(expected, printed, ELLIPSIS):
        difference = doctest.OutputChecker().output_difference(doctest.Example(shown, expected), printed, ELLIPSIS)
        pytest.fail(f"{shown}\n{difference}")


def run_console(block: Block, document: str) -> None:
    """`$ quant ...` lines, each followed by what it prints; `...` stands for any text."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, expected = part.partition("\n")
        command = shlex.split(line)
        assert command[0] == "quant", f"{document}:{block.line}: only `quant` is run; show {command[0]} in a sh block"
        environment = {**os.environ, "PYTHONWARNINGS": "error::UserWarning", "COLUMNS": "120"}
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, f"{document}: $ {line}\n{done.stderr}"
        if expected:
            check_output(expected, done.stdout, f"{document}: $ {line}")


def run(shown: list[Block], document: str) -> None:
    namespace: dict[str, Any] = {"__name__": "shown"}
    printed = None
    for block in shown:
        if block.language == "text":
            assert printed is not None, f"{document}:{block.line}: no python block before it prints this"
            check_output(block.text, printed, f"{document}:{block.line}")
        printed = run_python(block, document, namespace) if block.language == "python" else None
        if block.language == "console":
            run_console(block, document)


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory whose files can be imported, as a script's beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.usefixtures("own_registries", "in_a_folder")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_it_shows_runs(document: str) -> None:
    run([block for block in blocks((CHECKOUT / document).read_text()) if not block.needs], document)


@pytest.mark.filterwarnings("ignore")  # what these libraries warn of themselves
@pytest.mark.usefixtures("own_registries", "torchvision_loads", "in_a_folder")
@pytest.mark.parametrize(
    ("document", "library"),
    sorted({(one, block.needs) for one in DOCUMENTS for block in blocks((CHECKOUT / one).read_text()) if block.needs}),
)
def test_what_needs_another_library_runs(document: str, library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    run([block for block in blocks((CHECKOUT / document).read_text()) if block.needs == library], document)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_its_links_lead_somewhere(document: str) -> None:
    path = CHECKOUT / document
    targets = [link for link in LINK.findall(FENCE.sub("", path.read_text())) if "://" not in link]
    assert [link for link in targets if not (path.parent / link).exists()] == []


def test_the_guide_lists_the_types_that_are_quantised() -> None:
    from quant.nn.registry import supported

    page = (CHECKOUT / "docs" / "guides" / "dynamic.md").read_text()
    table = page.partition("## What is quantised dynamically")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert sorted(listed) == sorted(base.__name__ for base in supported() if base.__module__.startswith("torch."))


def test_the_guide_lists_the_backends() -> None:
    from quant.kernels import available

    table = (CHECKOUT / "docs" / "guides" / "backends.md").read_text().partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(available())


def test_the_documents_name_only_targets_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), flags=re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", (CHECKOUT / document).read_text(), flags=re.MULTILINE))
        assert named <= targets, document


def test_a_block_that_fails_is_reported_at_its_line() -> None:
    [block] = blocks("# Title\n\n```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run_python(block, "README.md", {})
    assert caught.traceback[-1].lineno + 1 == 5


def test_a_block_says_which_library_it_needs() -> None:
    found = blocks("```python\nx = 1\n```\n\n```python needs=timm\nimport timm\n```\n")
    assert [(one.needs, one.line, one.text) for one in found] == [("", 2, "x = 1\n"), ("timm", 6, "import timm\n")]


def test_printed_text_that_drifted_is_reported() -> None:
    shown, expected = blocks("```python\nprint(1.25)\n```\n\n```text\n1.5...\n```\n")
    with pytest.raises(pytest.fail.Exception, match=r"README.md:6[^$]*1\.25"):
        check_output(expected.text, run_python(shown, "README.md", {}), f"README.md:{expected.line}")


def test_output_that_drifted_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pytest.fail.Exception, match="quant doctor"):
        run_console(Block("console", "$ quant doctor\nsomething else\n", 1), "README.md")
