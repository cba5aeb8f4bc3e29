"""`quant calibrate` from its arguments to its output, around a model that is prepared by hand."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quant.calibrate import CalibrationError, CalibrationWarning, DataError, command
from quant.calibrate.command import Verbs, add_arguments, calibrate
from quant.observers import make_observer
from torch import Tensor, nn

ROWS = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)


class Net(nn.Module):
    """A layer, and after `prepare` an observer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.observer = nn.Identity()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.observer(x))
        return out


class Recorder:
    """Verbs that note how they were called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @property
    def verbs(self) -> Verbs:
        return Verbs(load_model=self.load, prepare=self.prepare, convert=self.convert, save=self.save)

    def load(self, name: str, weights: str | None) -> nn.Module:
        self.calls.append(("load", name, weights))
        return Net()

    def prepare(self, model: nn.Module, example: Any, observer: str, options: dict[str, float]) -> nn.Module:
        self.calls.append(("prepare", example, observer, options))
        model.observer = make_observer(observer, **options)
        return model

    def convert(self, prepared: nn.Module) -> nn.Module:
        self.calls.append(("convert",))
        return prepared

    def save(self, model: nn.Module, path: str) -> None:
        self.calls.append(("save", path))
        assert isinstance(model, Net)
        Path(path).write_text(str(model.observer.qparams().scale.item()))


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--model", "nets:make", *arguments])


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", ROWS)
    return tmp_path / "rows.npy"


def test_ranges_are_printed_and_the_model_is_saved(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder, out = Recorder(), tmp_path / "model.q8"
    arguments = ["--weights", "w.pt", "--data", str(rows), "--batch-size", "8", "--observer", "minmax"]
    assert calibrate(options(*arguments, "--out", str(out)), recorder.verbs) == 0
    load, prepare, convert, save = recorder.calls
    assert load == ("load", "nets:make", "w.pt")
    assert prepare[2] == "minmax"
    [example] = prepare[1]
    assert torch.equal(example, torch.from_numpy(ROWS[:8]))
    assert (convert, save) == (("convert",), ("save", str(out)))
    scale = (max(ROWS.max(), 0) - min(ROWS.min(), 0)) / 255
    assert float(out.read_text()) == pytest.approx(scale)
    printed, said = capsys.readouterr()
    assert f"observer  MinMax    1         [{ROWS.min():.4g}, {ROWS.max():.4g}]" in printed
    assert "20 samples in 3 batches" in printed
    assert f"wrote {out}" in printed
    assert "done, 3 of 3 batches" in said


def test_without_out_nothing_is_converted(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    calibrate(options("--data", str(rows), "--limit", "5", "--quiet"), recorder.verbs)
    assert [call[0] for call in recorder.calls] == ["load", "prepare"]
    printed, said = capsys.readouterr()
    assert "5 samples in 1 batch," in printed
    assert "Histogram" in printed
    assert said == ""


def test_suspicions_go_to_standard_error(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(rows, np.full((4, 3), 7.0))
    calibrate(options("--data", str(rows), "--quiet"), Recorder().verbs)
    printed, said = capsys.readouterr()
    assert said == "warning: observer: is always 7, constant: a dead layer, or too little data\n"
    assert "[7, 7]" in printed


def test_json(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(rows, np.full((4, 3), np.nan))
    with pytest.warns(CalibrationWarning):
        calibrate(options("--data", str(rows), "--quiet", "--json"), Recorder().verbs)
    data = json.loads(capsys.readouterr().out)
    assert data["run"]["samples"] == 4
    assert len(data["run"]["warnings"]) == 2
    assert [(layer["layer"], layer["nan_count"], layer["low"]) for layer in data["layers"]] == [("observer", 12, None)]


def test_a_generator_loses_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch is needed before the run, to prepare the model with."""
    (tmp_path / "generator_under_test.py").write_text(
        "import torch\ndef make():\n    for value in (9.0, 1.0, 2.0, 30.0):\n        yield torch.full((1, 3), value), 7"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    recorder = Recorder()
    arguments = ["--data", "generator_under_test:make", "--out", "o", "--observer", "minmax", "--quiet", "--limit", "3"]
    calibrate(options(*arguments), recorder.verbs)
    assert float(Path("o").read_text()) == pytest.approx(9.0 / 255)
    [example] = recorder.calls[1][1]
    assert example.tolist() == [[9.0] * 3]
    sys.modules.pop("generator_under_test")


def test_dicts_prepare_the_model_by_keyword(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=ROWS, label=np.arange(20))
    recorder = Recorder()
    with pytest.warns(CalibrationWarning, match="label, which forward does not take"):
        calibrate(options("--data", str(tmp_path / "d.npz"), "--quiet"), recorder.verbs)
    assert list(recorder.calls[1][1]) == ["x"]


def test_a_resumed_command_goes_on(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", str(rows), "--quiet", "--batch-size", "4", "--checkpoint", str(tmp_path / "c"), "--json"]
    torch.manual_seed(0)
    calibrate(options(*arguments, "--limit", "8"), Recorder().verbs)
    torch.manual_seed(0)
    capsys.readouterr()
    calibrate(options(*arguments), Recorder().verbs)
    run = json.loads(capsys.readouterr().out)["run"]
    assert (run["resumed"], run["batches"], run["samples"]) == (2, 5, 20)


def test_every_option_reaches_the_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(command.readers, "read", lambda data, **given: seen.update(given, data=data) or [])
    text = "--data d --batch-size 2 --limit 9 --shuffle --seed 4 --image-size 192x256 --channels 1 --scale 1/128"
    with pytest.raises(DataError, match="--data d: it gave no batches"):
        calibrate(options(*text.split(), "--mean=-0.5,1/2", "--std", "2", "--fields", "a,b"), Recorder().verbs)
    assert seen == {
        "data": "d",
        "batch_size": 2,
        "limit": 9,
        "shuffle": True,
        "seed": 4,
        "shard": (0, 1),
        "image_size": (192, 256),
        "channels": 1,
        "scale": 1 / 128,
        "mean": [-0.5, 0.5],
        "std": [2.0],
        "fields": ["a", "b"],
    }
    assert options("--data", "d", "--image-size", "224").image_size == 224


@pytest.mark.parametrize(
    "wrong",
    [
        "--limit 0",
        "--batch-size x",
        "--image-size 3x4x5",
        "--image-size big",
        "--image-size 0",
        "--mean 1,x",
        "--std 1/0",
        "--observer fixed",
        "--observer-option 99.9",
        "--observer-option percentile=",
        "--observer-option =9",
        "--channels 2",
    ],
)
def test_wrong_values_are_the_parser_s_errors(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--data", "d", *wrong.split())
    assert f"argument {wrong.split()[0]}" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_known_before_the_work(rows: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(DataError, match=r"--out .*missing/model\.q8: there is no such folder"):
        calibrate(options("--data", str(rows), "--out", str(tmp_path / "missing" / "model.q8")), recorder.verbs)
    assert recorder.calls == []


def test_a_checkpoint_that_is_a_folder_is_known_before_the_work(rows: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(DataError, match=rf"--checkpoint {tmp_path}: this is a folder, name a file in it"):
        calibrate(options("--data", str(rows), "--checkpoint", str(tmp_path)), recorder.verbs)
    assert recorder.calls == []


def test_a_place_for_ranges_that_cannot_be_written_is_known_before_the_work(rows: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(DataError, match=r"--save-ranges .*missing/r\.json: there is no such folder"):
        calibrate(options("--data", str(rows), "--save-ranges", str(tmp_path / "missing" / "r.json")), recorder.verbs)
    assert recorder.calls == []


def test_ranges_are_written_and_taken(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "ranges.json", tmp_path / "out"
    options_of = ["--observer", "percentile", "--observer-option", "percentile=90", "--observer-option", "bins=256"]
    recorder = Recorder()
    calibrate(options("--data", str(rows), "--quiet", "--save-ranges", str(file), *options_of), recorder.verbs)
    assert recorder.calls[1][2:] == ("percentile", {"percentile": 90, "bins": 256})
    assert f"wrote {file}" in capsys.readouterr().out
    scale = json.loads(file.read_text())["ranges"]["observer"]["info"]["scale"]
    calibrate(options("--data", str(rows), "--quiet", "--ranges", str(file), "--out", str(out)), Recorder().verbs)
    assert float(out.read_text()) == pytest.approx(scale, rel=1e-6)
    assert "observer  Given" in capsys.readouterr().out


def test_errors_are_for_the_caller(rows: Path) -> None:
    np.save(rows, np.zeros((4, 5), np.float32))
    with pytest.raises(CalibrationError, match="batch 0, float32"):
        calibrate(options("--data", str(rows), "--quiet"), Recorder().verbs)


RANK = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("under_test", sys.argv[1])
this = importlib.util.module_from_spec(spec)
spec.loader.exec_module(this)
torch.manual_seed(0)
sys.exit(this.calibrate(this.options(*sys.argv[2:]), this.Recorder().verbs))
"""


@pytest.mark.parametrize("limit", ["20", "1"], ids=["both ranks have data", "rank 1 has none"])
def test_processes_of_torchrun_share_the_data(limit: str, rows: Path, tmp_path: Path) -> None:
    """torchrun's part is its environment variables."""
    out = tmp_path / "out"
    arguments = ["--data", str(rows), "--limit", limit, "--batch-size", "3", "--observer", "minmax", "--out", str(out)]
    with_port = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, __file__, *arguments],
            env={**with_port, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], said
    seen = ROWS[: int(limit)]
    scale = (max(seen.max(), 0) - min(seen.min(), 0)) / 255
    assert float(out.read_text()) == pytest.approx(scale)
    assert f"{limit} sample{'' if limit == '1' else 's'} in " in said[0][0]
    assert said[1][0] == ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
