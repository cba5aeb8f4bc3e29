"""`quant sensitivity` and `quant autoquant`, from data on disk to files, and what they say when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from quant.kernels import ops

import quant
from quant.cli import main

MODELS = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)).eval()

def inputs():
    torch.manual_seed(1)
    return torch.randn(200, 16)

def accuracy(other):
    return (other(inputs()).argmax(1) == model()(inputs()).argmax(1)).double().mean()

def error(other):
    return 1 - accuracy(other)

def fails(other):
    raise OSError("the disk is away")

number = 3
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "searched_models"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((128, 16)).astype(np.float32))


COMMON = ["--model", "searched_models:model", "--data", "rows.npy", "--quiet"]
METRIC = ["--metric", "searched_models:accuracy"]


def test_sensitivity_prints_and_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sensitivity", *COMMON, *METRIC, "--out", "found.json", "--plot", "found.svg"]) == 0
    said = capsys.readouterr().out
    assert "only int8" in said
    assert "wrote found.json" in said
    assert {one["name"] for one in json.loads(Path("found.json").read_text())["layers"]} == {"0", "2", "4"}
    assert Path("found.svg").read_text().startswith("<svg")
    assert main(["sensitivity", *COMMON, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["float_metric"] is None


@pytest.mark.skipif(bool(ops.extension_problem()), reason="float is faster than the reference: no int8 model to write")
def test_autoquant_writes_a_model_that_load_reads(capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--out", "best.q8", "--recipe", "best.json", "--plot", "best.svg", "--checkpoint", "search.json"]
    assert main(["autoquant", *COMMON, *METRIC, "--max-drop", "0.5", "--objective", "size", *files]) == 0
    said = capsys.readouterr().out
    assert "models scored" in said
    assert "wrote best.q8" in said
    import searched_models  # type: ignore[import-not-found]

    loaded = quant.load("best.q8", model=searched_models.model())
    found = json.loads(Path("best.json").read_text())
    assert float(searched_models.accuracy(loaded)) == pytest.approx(found["metric"])
    assert found["form"] in ("static", "dynamic")
    assert torch.is_tensor(loaded(torch.zeros(1, 16)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metric", "searched_models"], "--metric is 'searched_models', expected package.module:function"),
        (["--metric", "nowhere:accuracy"], "--metric: there is no module 'nowhere'"),
        (["--metric", "searched_models:nothing"], "--metric: 'searched_models' has no 'nothing'"),
        (["--metric", "searched_models:number"], "it is of type int, expected a function"),
        (["--metric", "searched_models:fails"], "failed with OSError"),
        (["--metric", "searched_models:error"], "return its negative"),
        ([*METRIC, "--max-drop", "-1"], "max_drop is -1.0"),
        ([*METRIC, "--plot", "best.png"], "--plot: best.png ends in '.png', expected .svg"),
        ([*METRIC, "--backend", "none"], "--backend: "),
    ],
    ids=[
        "no colon",
        "no module",
        "no function",
        "a number",
        "it fails",
        "less is better",
        "a drop",
        "a suffix",
        "a name",
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["autoquant", *COMMON, "--max-drop", "0.1", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_no_int8_model_is_an_error_where_one_was_to_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(
        [
            "autoquant",
            *COMMON,
            *METRIC,
            "--keep-float",
            "[024]",
            "--max-drop",
            "0",
            "--objective",
            "size",
            "--out",
            "a.q8",
        ]
    )
    assert status == 2
    assert "no layer can be quantised" in capsys.readouterr().err
