"""calibrate/README.md: its lines run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import quant.calibrate
import torch
from quant.observers import MinMaxObserver
from torch import nn

README = (Path(__file__).resolve().parents[2] / "calibrate" / "README.md").read_text()


def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"^    (.*)$", README, flags=re.MULTILINE))
    names = {"quant": quant, "prepared": nn.Sequential(MinMaxObserver()), "batches": [torch.tensor([-1.0, 2.0])]}
    exec(code, names)
    assert names["done"].batches == 1  # type: ignore[union-attr]
    assert capsys.readouterr().out == "0 -1.0 2.0 ()\n"


@pytest.mark.parametrize("name", re.findall(r"quant\.calibrate\.(\w+)", README))
def test_its_names_exist(name: str) -> None:
    assert name in quant.calibrate.__all__
