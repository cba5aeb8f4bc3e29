"""Batches from folders, .npy, .npz, .csv and loaders; and one clear error for each way in which they can be wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quant.calibrate import DataError, read
from torch import Tensor

ROWS = np.arange(30, dtype=np.float32).reshape(10, 3)


@pytest.fixture
def npy(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", ROWS)
    return tmp_path / "x.npy"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three images of 2 x 2 in grey, the last in a subfolder, among files that are no images."""
    folder = tmp_path / "photos"
    (folder / "z").mkdir(parents=True)
    for name, value in (("b.pgm", 51), ("a.ppm", 0), ("z/a.pgm", 255)):
        kind = b"P6" if name.endswith("ppm") else b"P5"
        (folder / name).write_bytes(kind + b" 2 2 255\n" + bytes([value] * (12 if kind == b"P6" else 4)))
    (folder / "README.txt").write_text("not an image")
    (folder / ".hidden.pgm").write_text("nor this")
    return folder


def rows_of(batches: Any) -> list[list[float]]:
    return [row for batch in batches for row in batch.tolist()]


def test_npy_in_batches(npy: Path) -> None:
    batches = read(npy, batch_size=4)
    assert len(batches) == 3  # type: ignore[arg-type]
    assert [batch.shape for batch in batches] == [(4, 3), (4, 3), (2, 3)]
    assert rows_of(batches) == ROWS.tolist()
    assert rows_of(batches) == ROWS.tolist(), "the second pass differs"


def test_limit_and_shards_cover_each_sample_once(npy: Path) -> None:
    assert rows_of(read(npy, limit=3)) == ROWS[:3].tolist()
    shards = [rows_of(read(npy, shuffle=True, limit=7, batch_size=2, shard=(rank, 3))) for rank in range(3)]
    whole = rows_of(read(npy, shuffle=True, limit=7))
    assert [len(shard) for shard in shards] == [3, 2, 2]
    assert sorted(row for shard in shards for row in shard) == sorted(whole)
    assert list(read(npy, limit=1, shard=(1, 2))) == []


def test_shuffle_is_the_seed_s(npy: Path) -> None:
    one, same, other = (rows_of(read(npy, shuffle=True, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other
    assert sorted(one) == sorted(other) == ROWS.tolist()
    assert one != ROWS.tolist()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (np.float64, torch.float32),
        (np.float16, torch.float32),
        (">f4", torch.float32),
        (np.uint8, torch.int64),
        (np.uint16, torch.int64),
        (">i4", torch.int64),
        (np.int64, torch.int64),
        (bool, torch.bool),
    ],
    ids=str,
)
def test_kinds_of_numbers(kind: Any, expected: torch.dtype, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", (ROWS % 2).astype(kind))
    [batch] = read(tmp_path / "x.npy")
    assert batch.dtype == expected
    assert batch.tolist() == (ROWS % 2).tolist()
    [scaled] = read(tmp_path / "x.npy", scale=2.0)
    assert scaled.dtype == torch.float32
    assert scaled.tolist() == (ROWS % 2 * 2).tolist()


def test_a_number_is_the_mean_of_every_channel(npy: Path) -> None:
    [batch] = read(npy, mean=127, std=np.float32(2.0))
    assert torch.equal(batch, (torch.from_numpy(ROWS) - 127) / 2)


def test_scale_then_mean_then_std(npy: Path) -> None:
    [batch] = read(npy, scale=0.5, mean=[1.0, 2.0, 3.0], std=[2.0])
    torch.testing.assert_close(batch, (torch.from_numpy(ROWS) * 0.5 - torch.tensor([1.0, 2.0, 3.0])) / 2.0)


def test_values_that_are_not_finite_come_through(tmp_path: Path) -> None:
    """calibrate.run counts and names them; a reader must not hide them, nor what float32 cannot hold."""
    np.save(tmp_path / "x.npy", np.array([[np.nan, 1e300]]))
    (tmp_path / "x.csv").write_text("nan,1e300")
    for name in ("x.npy", "x.csv"):
        [batch] = read(tmp_path / name)
        assert torch.isnan(batch[0, 0])
        assert torch.isinf(batch[0, 1])


def test_npz(tmp_path: Path) -> None:
    labels = np.arange(10)
    np.savez(tmp_path / "one.npz", x=ROWS)
    np.savez(tmp_path / "two.npz", x=ROWS, label=labels)
    np.savez_compressed(tmp_path / "unnamed.npz", ROWS, labels)
    np.savez(tmp_path / "sets.npz", x_train=ROWS, x_test=ROWS[:4])
    [one] = read(tmp_path / "one.npz")
    assert one.tolist() == ROWS.tolist()
    [two] = read(tmp_path / "two.npz")
    assert {name: list(value.shape) for name, value in two.items()} == {"x": [10, 3], "label": [10]}
    [(x, label)] = read(tmp_path / "unnamed.npz")
    assert (x.dtype, label.dtype) == (torch.float32, torch.int64)
    [chosen] = read(tmp_path / "sets.npz", fields=["x_test"])
    assert chosen.shape == (4, 3)


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("1,2.5\n-3e2, nan\n\n")
    [batch] = read(path)
    assert (batch.dtype, batch[:, 0].tolist(), batch[0, 1].item()) == (torch.float32, [1.0, -300.0], 2.5)
    path.write_text('\ufeffage,"name, first",weight\n7,Ada,1\n8,"Lin\nus",2\n')
    [batch] = read(path, fields=["weight", "age"])
    assert batch.tolist() == [[1.0, 7.0], [2.0, 8.0]]


def test_a_folder_of_images(photos: Path) -> None:
    [batch] = read(photos)
    assert batch.shape == (3, 3, 2, 2)
    assert batch[:, 0, 0, 0].tolist() == pytest.approx([0.0, 0.2, 1.0])  # a.ppm, b.pgm, z/a.pgm
    [batch] = read(photos, channels=1, image_size=(4, 6), mean=[0.2], std=[0.5])
    assert batch.shape == (3, 1, 4, 6)
    assert batch[:, 0, 0, 0].tolist() == pytest.approx([-0.4, 0.0, 1.6], abs=1e-6)
    [batch] = read(photos, scale=1.0)
    assert batch.max() == 255.0


LOADERS = """
import torch
count = 0
def generator():
    for i in range(5):
        yield torch.full((2, 3), float(i))
listed = [torch.zeros(1, 3), torch.ones(1, 3)]
class Loader(torch.utils.data.DataLoader):
    def __init__(self):
        super().__init__(listed, batch_size=None)
class Nested:
    @staticmethod
    def make():
        return listed
def fails():
    raise OSError("no such disk")
def text():
    return "photos"
"""


@pytest.fixture
def loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "loaders_under_test.py").write_text(LOADERS)
    (tmp_path / "broken_under_test.py").write_text("import not_to_be_found_anywhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "loaders_under_test"
    sys.modules.pop("loaders_under_test", None)


def firsts(batches: Any) -> list[float]:
    return [batch.flatten()[0].item() for batch in batches]


def test_a_loader(loaders: str) -> None:
    assert firsts(read(f"{loaders}:generator")) == [0, 1, 2, 3, 4]
    assert firsts(read(f"{loaders}:generator", limit=3)) == [0, 1, 2]
    assert firsts(read(f"{loaders}:generator", limit=3, shard=(1, 2))) == [1]
    assert firsts(read(f"{loaders}:listed")) == [0, 1]
    assert firsts(read(f"{loaders}:Loader")) == [0, 1]
    assert firsts(read(f"{loaders}:Nested.make")) == [0, 1]
    assert len(read(f"{loaders}:listed", shard=(1, 2))) == 1  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        len(read(f"{loaders}:generator"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("loaders_under_test:absent", {}, "there is no 'absent'; there is generator, Loader, Nested, fails, text"),
        ("loaders_under_test:fails", {}, "failed with OSError: no such disk"),
        ("loaders_under_test:text", {}, "it gives a str, expected an iterable"),
        ("loaders_under_test:", {}, "expected a file, a folder, or package.module:loader"),
        ("absent_under_test:x", {}, "no such file or folder, and no module 'absent_under_test'"),
        ("loaders_under_test:listed", {"shuffle": True, "scale": 2.0}, "scale, shuffle do not apply to a loader"),
    ],
)
def test_a_wrong_loader(loaders: str, spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(read(spec, **options))


def test_a_loader_that_cannot_import_shows_its_own_error(loaders: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="not_to_be_found_anywhere"):
        read("broken_under_test:x")


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_objects_are_refused_unread(tmp_path: Path) -> None:
    trap = np.array([Trap(tmp_path / "sprung")], dtype=object)
    np.save(tmp_path / "x.npy", trap, allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=trap)
    (tmp_path / "pickle.npy").write_bytes((tmp_path / "x.npy").read_bytes()[-60:])
    for name in ("x.npy", "x.npz", "pickle.npy"):
        with pytest.raises(DataError, match=rf"{name}: holds objects, .* could run code"):
            read(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def write(path: Path, content: Any) -> Path:
    """A file of that content: bytes, text, arrays by name, or one array."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content)
    elif isinstance(content, dict):
        np.savez(path, **content)
    elif content is not None:
        np.save(path, content)
    return path


BAD: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "no file": ("x.npy", None, {}, "there is no such file or folder"),
    "another suffix": ("x.txt", "1", {}, r"ends in '\.txt', expected \.npy, \.npz, \.csv"),
    "one image": ("x.png", b"", {}, "a single image; give the folder"),
    "text as npy": ("x.npy", "1 2 3", {}, "holds objects, or is not numpy's at all"),
    "a truncated npy": ("x.npy", b"\x93NUMPY\x01\x00", {}, "numpy cannot read it"),
    "an empty npy": ("x.npy", b"", {}, "numpy cannot read it|is not numpy's at all"),
    "strings": ("x.npy", np.array(["a"]), {}, "holds <U1, expected real numbers"),
    "complex": ("x.npy", np.array([1j]), {}, "holds complex128, expected real numbers"),
    "a record": ("x.npy", np.zeros(2, [("a", "f4")]), {}, r"holds \[\('a', '<f4'\)\], expected real"),
    "a scalar": ("x.npy", np.array(1.0), {}, "a single number, expected samples"),
    "no samples": ("x.npy", np.zeros((0, 3)), {}, "it has no samples"),
    "text as npz": ("x.npz", "1 2 3", {}, "x.npz: "),
    "an npz with no array": ("x.npz", {}, {}, "it holds no arrays"),
    "lengths": ("x.npz", {"a": ROWS, "b": ROWS[:2]}, {}, r"differ in length .*--fields a"),
    "an absent array": ("x.npz", {"a": ROWS}, {"fields": ["b"]}, "there is no array b; it has a"),
    "a word in a csv": ("x.csv", "a,b\n1,2\n3,x\n", {}, r"line 3, column 2 \(b\): 'x' is not a number"),
    "a word without header": ("x.csv", "1,2\n,4\n", {}, "line 2, column 1: '' is not a number"),
    "a ragged csv": ("x.csv", "1,2\n3\n", {}, "line 2: 1 columns, expected 2"),
    "an empty csv": ("x.csv", "", {}, "it has no rows of numbers"),
    "only a header": ("x.csv", "a,b\n", {}, "it has no rows of numbers"),
    "an absent column": ("x.csv", "a,b\n1,2\n", {"fields": ["c"]}, "there is no column c; it has a, b"),
    "fields, no header": ("x.csv", "1,2\n", {"fields": ["a"]}, "fields need a header line"),
    "a binary csv": ("x.csv", b"\xff\xfe\x00", {}, "not a CSV file of text"),
    "an open quote": ("x.csv", '1,"2\n', {}, "not a CSV file of text"),
    "fields of a npy": ("x.npy", ROWS, {"fields": ["a"]}, "a .npy holds one array"),
    "a size for arrays": ("x.npy", ROWS, {"image_size": 4}, "image_size applies to a folder of images"),
    "mean of another size": ("x.npy", ROWS, {"mean": [1.0, 2.0]}, "2 values, and a sample has shape"),
    "std of zero": ("x.npy", ROWS, {"std": [0.0]}, "must not be zero"),
    "mean no number": ("x.npy", ROWS, {"mean": "half"}, "mean is 'half', expected a number, or one per channel"),
    "std no number": ("x.npy", ROWS, {"std": [None]}, r"std is \[None\], expected a number"),
    "mean not finite": ("x.npy", ROWS, {"mean": [float("nan")]}, "is not finite"),
    "batch size": ("x.npy", ROWS, {"batch_size": 0}, "batch_size is 0"),
    "limit": ("x.npy", ROWS, {"limit": 0}, "limit 0, expected at least 1"),
}


@pytest.mark.parametrize(("name", "content", "options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_says_what_and_where(
    name: str, content: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        list(read(write(tmp_path / name, content), **options))


def test_a_folder_without_images(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no images \(.*\) in the folder; it has no files"):
        read(tmp_path / "empty")
    (tmp_path / "empty" / "x.txt").touch()
    with pytest.raises(DataError, match=r"it has files of \.txt"):
        read(tmp_path / "empty")
    with pytest.raises(DataError, match="not to a folder of images"):
        read(photos, fields=["x"])


@pytest.mark.parametrize("batch_size", [1, 32], ids=["in two batches", "in one"])
def test_images_of_different_sizes_name_two_of_them(photos: Path, batch_size: int) -> None:
    (photos / "c.pgm").write_bytes(b"P5 3 2 255\n" + bytes(6))
    batches = read(photos, batch_size=batch_size)
    with pytest.raises(DataError, match=r"c\.pgm has \[3, 2, 3\], .*a\.ppm \[3, 2, 2\]; .*--image-size"):
        list(batches)
    [batch] = read(photos, image_size=2)
    assert isinstance(batch, Tensor)
    assert batch.shape == (4, 3, 2, 2)
