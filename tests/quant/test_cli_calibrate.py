"""`quant calibrate` from data on disk to a file that `quant.load` reads, and what it says when something is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quant
from quant.cli import main

MODELS = """
import torch
from torch import nn

def images():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

def rows():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

def loader():
    for value in range(4):
        yield torch.full((2, 3), float(value)), torch.tensor(value)

class Picky(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.limit, self.fc = limit, nn.Linear(3, 2)
    def forward(self, x):
        if x.max() > self.limit:
            raise RuntimeError(f"more than {self.limit}")
        return self.fc(x)

def at_once(): return Picky(-1.0)
def later(): return Picky(2.5)
def fails(): raise OSError("the disk is away")
def late():
    yield torch.ones(2, 3)
    raise ValueError("no more")
def empty(): return []
def activation(): return nn.ReLU()
"""
NAN = np.array([[float("nan")] * 3] * 2, dtype=np.float32)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG file of (height, width, 3) uint8 (www.w3.org/TR/png): no filter, one block."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = pixels.shape
    raw = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    ends = chunk(b"IHDR", header), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + ends[0] + chunk(b"IDAT", zlib.compress(raw)) + ends[1]


def ppm(pixels: np.ndarray[Any, Any]) -> bytes:
    return b"P6 %d %d 255\n" % (pixels.shape[1], pixels.shape[0]) + pixels.tobytes()


class Folder:
    """One user's folder, in which the command is run."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.capsys, self.nets = path, capsys, f"nets_{path.name}"
        (path / f"{self.nets}.py").write_text(MODELS)
        generator = np.random.default_rng(0)
        self.rows = generator.standard_normal((20, 3)).astype(np.float32)
        np.savez(path / "rows.npz", x=self.rows)
        self.pictures = [generator.integers(0, 256, (9, 8, 3), dtype=np.uint8) for _ in range(5)]

    def model(self, name: str) -> nn.Module:
        module = importlib.import_module(self.nets)
        made: nn.Module = getattr(module, name)()
        return made.eval()

    def run(self, model: str, data: str, *more: str) -> tuple[int, str, str]:
        status = main(["calibrate", "--model", f"{self.nets}:{model}", "--data", data, "--quiet", *more])
        printed, said = self.capsys.readouterr()
        return status, printed, said

    def fails(self, model: str, data: str, *more: str) -> str:
        """The one line of a command that fails."""
        status, _, said = self.run(model, data, *more)
        [line] = [line for line in said.splitlines() if "warning: " not in line]
        assert status == 2
        assert line.startswith("quant calibrate: ")
        return line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Folder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Folder(tmp_path, capsys)


def by_hand(model: nn.Module, batches: list[Tensor], recipe: quant.Recipe | None = None) -> nn.Module:
    return quant.quantize_static(model, batches, recipe, progress=False)


@pytest.mark.parametrize("kind", ["png", "ppm"])
def test_a_folder_of_images_to_an_int8_file(kind: str, folder: Folder) -> None:
    if kind == "png" and importlib.util.find_spec("PIL") is None:
        pytest.skip("Pillow is missing, which reads .png")
    Path("photos").mkdir()
    for index, pixels in enumerate(folder.pictures):
        Path(f"photos/{index}.{kind}").write_bytes(png(pixels) if kind == "png" else ppm(pixels))
    command = ["calibrate", "--model", f"{folder.nets}:images", "--data", "photos", "--image-size", "9x8"]
    done = subprocess.run(
        [sys.executable, "-m", "quant", *command, "--mean", "0.5", "--std", "0.25", "--out", "model.q8"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "5 samples in 1 batch," in done.stdout
    assert "wrote model.q8" in done.stdout
    assert "input_0  Histogram" in done.stdout
    batch = torch.stack([torch.from_numpy(pixels).permute(2, 0, 1) for pixels in folder.pictures]).float()
    batch = (batch * (1 / 255) - 0.5) / 0.25
    expected = by_hand(folder.model("images"), [batch])
    loaded = quant.load("model.q8", model=folder.model("images"))
    assert torch.equal(loaded(batch), expected(batch))


def test_an_npz_file_with_a_layer_kept_float(folder: Folder) -> None:
    status, printed, _ = folder.run("rows", "rows.npz", "--keep-float", "2", "--out", "m.q8", "--observer", "minmax")
    assert status == 0
    assert printed.splitlines()[-1] == "wrote m.q8"
    loaded = quant.load("m.q8", model=folder.model("rows"))
    assert quant.summary(loaded)["2"].detail == "the recipe says so"
    x = torch.from_numpy(folder.rows)
    recipe = quant.Recipe({"2": None}, default=quant.QConfig(activation_observer="minmax"))
    assert torch.equal(loaded(x), by_hand(folder.model("rows"), [x], recipe)(x))
    assert main(["summary", "m.q8"]) == 0
    assert str(quant.summary(loaded)).startswith(folder.capsys.readouterr().out.strip())  # which has packed no weight


def test_a_loader_and_a_backend(folder: Folder) -> None:
    status, printed, _ = folder.run(
        "rows", f"{folder.nets}:loader", "--backend", "reference", "--out", "m.q8", "--json"
    )
    assert status == 0
    assert json.loads(printed)["run"]["samples"] == 8
    loaded: Any = quant.load("m.q8", model=folder.model("rows"))
    assert loaded[0].backend == "reference"


def test_without_out_only_ranges_are_printed(folder: Folder) -> None:
    status, printed, _ = folder.run("rows", "rows.npz")
    assert status == 0
    assert "wrote" not in printed
    assert sorted(path.name for path in folder.path.iterdir()) == [f"{folder.nets}.py", "rows.npz"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rows", "rows.npz", "--out", "nowhere/m.q8"), "--out: cannot write in nowhere: No such file"),
        (("rows", "rows.npz", "--out", "."), "--out: . is a folder"),
        (("rows", "rows.npz", "--backend", "gpu"), "--backend: no backend is called 'gpu'; there are native"),
        (("rows", "rows.npz", "--save-ranges", "nowhere/r"), "--save-ranges: cannot write in nowhere: No such file"),
        (("rows", "rows.npz", "--ranges", "r.json"), "--ranges: there is no file r.json"),
        (("rows", "rows.npz", "--ranges", "{nets}.py"), "{nets}.py, line 2: not JSON"),
        (
            ("rows", "rows.npz", "--observer", "percentile", "--observer-option", "percent=9"),
            "observer 'percentile' has no option 'percent'; its options: percentile, bins",
        ),
        (("rows", "rows.npz", "--keep-float", "head"), "no module matches 'head' -> float; the model has ['0', '1'"),
        (("rows", "rows.npz", "--keep-float", "*"), "no layer can be quantised; 0: the recipe says so"),
        (("rows", "rows.npy"), "rows.npy: there is no such file or folder"),
        (("rows", "{nets}.py"), "{nets}.py"),
        (("rows", "{nets}:fails"), "failed with OSError: the disk is away"),
        (("rows", "{nets}:empty"), "it gave no batches"),
        (("images", "rows.npz"), "the model fails on the first batch, (float32 [20, 3]): RuntimeError: Expected 3D"),
        (("activation", "rows.npz"), "no layer can be quantised; (root): what it reads is float"),
        (("nothing", "rows.npz"), "has no 'nothing'; it has images, rows, loader"),
        (("rows", "rows.npz", "--weights", "w.pt"), "--weights: there is no file w.pt"),
        (("rows", "rows.npz", "--checkpoint", "nowhere/state"), "nowhere"),
        (("rows", "nan.npz"), "saw no data"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
@pytest.mark.filterwarnings("ignore::quant.calibrate.CalibrationWarning")
def test_what_the_user_can_put_right_is_one_line(arguments: tuple[str, ...], message: str, folder: Folder) -> None:
    np.savez("nan.npz", x=NAN)
    more = () if "--out" in arguments else ("--out", "o.q8")
    line = folder.fails(*(argument.replace("{nets}", folder.nets) for argument in (*arguments, *more)))
    assert message.replace("{nets}", folder.nets) in line
    assert not Path("o.q8").exists()


@pytest.mark.parametrize(
    ("model", "data", "message", "raised"),
    [
        ("at_once", "loader", "the model fails on the first batch", 'raise RuntimeError(f"more'),
        ("later", "loader", "more than 2.5", 'raise RuntimeError(f"more'),
        ("rows", "late", "no more", 'raise ValueError("no more")'),
        ("rows", "fails", "the disk is away", "raise OSError"),
    ],
)
def test_an_error_of_the_users_code_comes_with_its_line(
    model: str, data: str, message: str, raised: str, folder: Folder
) -> None:
    line = folder.fails(model, f"{folder.nets}:{data}")
    number = 1 + next(place for place, text in enumerate(MODELS.splitlines()) if raised in text)
    assert message in line
    assert f" at {folder.path / folder.nets}.py:{number}" in line.replace("(at ", " at ")


def test_ranges_go_out_are_edited_and_come_back(folder: Folder) -> None:
    status, printed, _ = folder.run("rows", "rows.npz", "--out", "a.q8", "--save-ranges", "ranges.json")
    assert status == 0
    assert "wrote ranges.json" in printed
    folder.run("rows", "rows.npz", "--observer", "minmax", "--ranges", "ranges.json", "--out", "b.q8")
    x = torch.from_numpy(folder.rows)
    first, same = (quant.load(f"{name}.q8", model=folder.model("rows")) for name in "ab")
    assert torch.equal(first(x), same(x))
    data = json.loads(Path("ranges.json").read_text())
    data["ranges"]["input_0"].update(low=0, high=0.25)
    Path("ranges.json").write_text(json.dumps(data))
    status, printed, said = folder.run("rows", "rows.npz", "--ranges", "ranges.json", "--out", "c.q8")
    assert status == 0
    assert "input_0  Given" in printed
    assert "of the values lie above the range" in said
    edited = quant.load("c.q8", model=folder.model("rows"))
    assert torch.equal(edited(x), edited(x.clamp(0, 0.25)))
    assert not torch.equal(edited(x), first(x))


def test_edited_ranges_need_no_second_pass_over_the_data(folder: Folder) -> None:
    """A given range is no part of what a checkpoint compares: statistics are the same under it."""
    again = ["--batch-size", "5", "--checkpoint", "state"]
    folder.run("rows", "rows.npz", *again, "--save-ranges", "ranges.json")
    data = json.loads(Path("ranges.json").read_text())
    data["ranges"]["0"].update(high=0.5)
    Path("ranges.json").write_text(json.dumps(data))
    status, printed, _ = folder.run("rows", "rows.npz", *again, "--ranges", "ranges.json", "--json")
    found = json.loads(printed)
    assert status == 0
    assert found["run"]["resumed"] == 4
    assert [layer["chosen_high"] for layer in found["layers"] if layer["layer"] == "0"] == [pytest.approx(0.5)]


def test_options_of_an_observer_come_from_the_command(folder: Folder) -> None:
    options = ["--observer", "percentile", "--observer-option", "percentile=80", "--observer-option", "bins=1024"]
    assert folder.run("rows", "rows.npz", "--batch-size", "20", "--out", "a.q8", *options)[0] == 0
    settings = {"percentile": 80, "bins": 1024}
    qconfig = quant.QConfig(activation_observer="percentile", activation_options=settings)
    x = torch.from_numpy(folder.rows)
    expected = by_hand(folder.model("rows"), [x], quant.Recipe(default=qconfig))
    assert torch.equal(quant.load("a.q8", model=folder.model("rows"))(x), expected(x))


def test_the_report_takes_ranges_too(folder: Folder) -> None:
    command = ["report", "--model", f"{folder.nets}:rows", "--data", "rows.npz", "--quiet", "--json"]
    assert main([*command, "--save-ranges", "ranges.json"]) == 0
    first = folder.capsys.readouterr().out
    assert main([*command, "--ranges", "ranges.json"]) == 0
    assert folder.capsys.readouterr().out == first
    data = json.loads(Path("ranges.json").read_text())
    data["ranges"]["0"].update(high=0.01)
    Path("ranges.json").write_text(json.dumps(data))
    assert main([*command, "--ranges", "ranges.json"]) == 0
    clipped = {step["name"]: step["high"] for step in json.loads(folder.capsys.readouterr().out)["steps"]}
    assert clipped["0"] == pytest.approx(0.01)


def test_two_processes_write_what_one_writes(folder: Folder) -> None:
    command = ["calibrate", "--model", f"{folder.nets}:rows", "--data", "rows.npz", "--batch-size", "5"]
    status, _, _ = folder.run("rows", "rows.npz", "--batch-size", "5", "--out", "one.q8", "--observer", "minmax")
    assert status == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "quant", *command, "--quiet", "--out", "two.q8", "--observer", "minmax"],
            env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    printed = [rank.communicate()[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    assert "20 samples" in printed[0]
    assert printed[1] == ""
    x = torch.from_numpy(folder.rows)
    one, two = (quant.load(f"{name}.q8", model=folder.model("rows")) for name in ("one", "two"))
    assert torch.equal(one(x), two(x))
