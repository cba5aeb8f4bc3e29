"""The comparison of two versions: equal for one and the same, and loud about any difference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .golden.child import digest
from .golden.run import Side, distance, report, run

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(
    bool({os.environ.get("OCTET_FAST_TESTS"), os.environ.get("QUANT_EXTENSION")} & {"1", "none"}),
    reason="OCTET_FAST_TESTS=1 or QUANT_EXTENSION=none: processes that convert networks are slow",
)
def test_a_checkout_equals_itself() -> None:
    command = [sys.executable, str(ROOT / "tests/golden/run.py"), "--against", str(ROOT), "--count", "25"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "all                     25 of    25 equal" in shown.stdout
    assert "Error" not in shown.stdout, "networks that end with an error compare nothing"


def test_a_difference_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["blocks-0", "blocks-1", "dynamic-0"]
    versions = {"octet": "1", "torch": "2"}
    one = Side("a", versions, {"blocks-0": "x", "blocks-1": "y", "dynamic-0": "z"})
    other = Side("b", {**versions, "octet": "0"}, {**one.results, "blocks-1": "error: ValueError"})
    assert report(one, one, names, None) == 0
    assert report(one, other, names, None) == 1
    assert "blocks                   1 of     2 equal" in capsys.readouterr().out
    assert report(one, Side("b", {**versions, "torch": "3"}, one.results), names, None) == 2
    assert "torch: 2 here, 3 there" in capsys.readouterr().err
    assert report(one, Side("b", versions, {}), names, None) == 1, "nothing was compared"


def test_a_package_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    for folder in ("quant", "kernels", "observers", "calibrate"):
        (tmp_path / folder).mkdir()
    (tmp_path / "quant/__init__.py").write_text("raise ImportError('nothing here')")
    with pytest.raises(RuntimeError, match="nothing here"):
        run(tmp_path, ["blocks-0", "blocks-1"], 1)


def test_any_bit_is_in_the_hash() -> None:
    x = torch.tensor([0.0, 1.0, float("nan")])
    values = {"out": x}
    assert digest(values) == digest({"out": x.clone()})
    assert digest(values) != digest({"out": torch.tensor([-0.0, 1.0, float("nan")])})
    assert digest(values) != digest({"out": x.reshape(3, 1)})
    assert digest(values) != digest({"out": x.view(torch.int32)})
    assert digest(values) != digest({"other": x})


def test_distance() -> None:
    one, other = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0])
    assert distance(one, other) == "1 of 3 values, by 1 at most, 13.2 dB"
