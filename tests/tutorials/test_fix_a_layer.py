"""The ten-minute tutorial: it runs to its asserts, and its page shows no line that the script does not have."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

TUTORIALS = Path(__file__).parents[2] / "tutorials"
SCRIPT, PAGE = TUTORIALS / "fix_a_layer.py", TUTORIALS / "README.md"


@pytest.mark.usefixtures("efficientnet_data")
def test_one_rule_mends_what_the_report_found(
    fix_a_layer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = fix_a_layer.tutorial(tmp_path / "report.html")
    assert 10 < before < 13
    assert after > 14
    printed = capsys.readouterr().out
    assert "_blocks.15._depthwise_conv" in printed
    assert "QConfig(activation_observer='minmax')" in printed
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    todo = page.partition("<h2>What to do</h2>")[2].partition("<h2>")[0]
    assert todo.index("_blocks.15._depthwise_conv") < todo.index("_blocks.13._depthwise_conv")


def test_missing_data_is_said_in_a_line(fix_a_layer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise fix_a_layer.DataUnavailable("efficientnet: not here")

    monkeypatch.setattr(fix_a_layer.efficientnet, "load", absent)
    with pytest.raises(SystemExit, match="fix_a_layer: efficientnet: not here"):
        fix_a_layer.main([])


def test_the_page_shows_the_script() -> None:
    lines = {line.strip() for line in SCRIPT.read_text().splitlines()}
    shown = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(shown) == 5
    assert [line for block in shown for line in block.splitlines() if line.strip() not in lines] == []
