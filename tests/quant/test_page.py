"""The HTML report: one file, every name escaped, worst first, and what the user must learn from it."""

from __future__ import annotations

import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quant
from quant.cli import main
from quant.page.markup import Markup, tag
from quant.types import CalibrationWarning

EVIL = '<script>alert("1")</script>&'


class Reader(html.parser.HTMLParser):
    """The elements and the text of a page; fails where tags do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name != "meta":
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


class Net(nn.Module):
    """A layer whose name is an attack, one with 3-bit weights, and a float step."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(EVIL, nn.Conv2d(3, 8, 3))
        self.narrow = nn.Conv2d(8, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.narrow(self.get_submodule(EVIL)(x).relu()).relu()
        return self.head(self.norm(x.mean((2, 3))))


def page(*, prepared: bool = True) -> str:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(8, 3, 8, 8)
    made = quant.prepare(model, x, quant.Recipe({"narrow": quant.QConfig(weight_bits=3)}))
    quant.calibrate.run(made, [x], progress=False)
    q = quant.convert(made)
    comparison = quant.compare(model, q, [x])
    return quant.report_html(q, comparison, prepared=made if prepared else None, title=EVIL)


def test_it_is_one_file_that_runs_nothing_and_refers_to_nothing() -> None:
    found = Reader(page())
    names = {name for name, _ in found.elements}
    assert not names & {"script", "link", "img", "iframe", "object", "base"}
    for _, attributes in found.elements:
        assert not set(attributes) & {"src", "href", "srcset"}
        assert not any(key.startswith("on") for key in attributes)
    style = re.findall(r"<style>(.*?)</style>", page(), re.DOTALL)
    assert len(style) == 1
    assert "url(" not in style[0]
    assert "@import" not in style[0]


def test_names_are_text_wherever_they_stand() -> None:
    text = page()
    assert EVIL not in text
    assert text.count("<script") == 0
    assert Reader(text).text.count(EVIL) >= 4


def test_the_worst_layer_comes_first_with_its_cause_and_the_way_out() -> None:
    text = Reader(page()).text
    body = text.partition("Layers, worst first")[2]
    assert 0 < body.index("narrow") < body.index("head")
    todo = text.partition("What to do")[2].partition("Error through the network")[0]
    assert "narrow adds an error of" in todo
    assert "Rounding of the weights to 3 bits. Give its weights 8 bits." in todo
    assert 'quant.Recipe({"narrow": quant.QConfig()})' in todo
    assert "LayerNorm has no int8 kernel" in text.partition("What is int8")[2]


def test_a_histogram_shows_the_range_and_what_is_clipped() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), torch.randn(4, 3, 16, 16)
    q = quant.quantize_static(model, [0.3 * x], progress=False)
    comparison = quant.compare(model, q, [x])
    found = comparison["input_0"].histogram
    assert found is not None
    assert sum(found.counts) == x.numel()
    assert found.low == x.min()
    text = quant.report_html(q, comparison)
    assert 'fill="var(--poor)"' in text
    assert 'fill="var(--band)"' in text
    assert "of the values lie outside the range" in Reader(text).text


def test_what_is_not_known_is_left_out() -> None:
    q = quant.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).eval())
    text = Reader(quant.report_html(q)).text
    assert "Sequential in int8" in text
    assert "worst first" not in text
    assert "What is int8, what is float, and why" in text


def test_what_is_no_comparison_is_refused() -> None:
    q = quant.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(TypeError, match=r"quant.report_html: comparison is a int, expected what quant.compare\(model"):
        quant.report_html(q, 3)  # type: ignore[arg-type]


def test_layers_without_error_or_without_values_are_drawn() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval()
    for layer in model:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    with pytest.warns(CalibrationWarning, match="every input always has one value"):
        q = quant.quantize_static(model, [torch.zeros(2, 4)], progress=False)
    comparison = quant.compare(model, q, [torch.zeros(2, 4)])
    assert "no error" in Reader(quant.report_html(q, comparison)).text
    json.dumps(comparison.to_dict(), allow_nan=False)


def test_markup_escapes_children_and_attributes() -> None:
    assert tag("p", EVIL, title=EVIL) == Markup(
        '<p title="&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;">'
        "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;</p>"
    )
    assert tag("p", tag("b", "x"), None, class_=None) == "<p><b>x</b></p>"


MODULE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "reported.py").write_text(MODULE)
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32))
    np.save(tmp_path / "wide.npy", np.zeros((4, 9), dtype=np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_writes_the_page(folder: Path) -> None:
    command = [sys.executable, "-m", "quant", "report", "--model", "reported:make", "--data", "rows.npy", "--quiet"]
    environment = {**os.environ, "PYTHONWARNINGS": "error::UserWarning"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "wrote report.html" in done.stdout
    assert "own dB" in done.stdout
    assert "Sequential in int8" in Reader((folder / "report.html").read_text(encoding="utf-8")).text


ARGUMENTS = ["report", "--model", "reported:make", "--data", "rows.npy", "--quiet"]


def test_the_command_leaves_layers_float_and_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--keep-float", "0", "--json", "--compare", "1", "--compare-data", "rows.npy"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert "2" in printed["order"]
    assert "0" not in printed["order"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "report.pdf"], "expected .html"),
        (["--out", "nowhere/report.html"], "cannot write in nowhere"),
        (["--compare", "0"], "--compare is 0, expected at least 1 batch"),
        (["--keep-float", "nothing*"], "no module matches"),
        (["--compare-data", "absent.npy"], "absent.npy"),
        (["--backend", "abacus"], "--backend: "),
        (["--data", "wide.npy"], "the model fails on the first batch, (float32 [4, 9]): RuntimeError"),
    ],
    ids=["suffix", "folder", "no batch", "no match", "no data", "backend", "data of another shape"],
)
def test_what_is_wrong_is_said_in_a_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([*ARGUMENTS, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "report.html").exists()
