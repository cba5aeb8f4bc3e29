"""Fashion-MNIST as it is read, and the networks that are trained on it: repeatable, kept, and learning at all."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import ModuleType

import pytest
import torch

NAMES = ("residual", "depthwise", "lstm", "bilstm")


def idx(path: Path, header: bytes, values: bytes) -> Path:
    path.write_bytes(gzip.compress(header + values))
    return path


def test_reads_idx(fashion: ModuleType, tmp_path: Path) -> None:
    header = b"\0\0\x08\x02" + (2).to_bytes(4, "big") + (3).to_bytes(4, "big")
    found = fashion.read_idx(idx(tmp_path / "a.gz", header, bytes(range(6))))
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("header", "values", "says"),
    [
        (b"\0\0\x08\x01\0\0\0\x06", b"12345", "5 values, expected 6"),
        (b"\0\0\x0d\x01\0\0\0\x01", b"1", "not an IDX file of bytes"),
        (b"\0\0\x08\x03\0\0", b"", "not an IDX file of bytes"),
    ],
    ids=["truncated", "floats", "header"],
)
def test_names_a_file_that_is_none(
    fashion: ModuleType, fetch: ModuleType, tmp_path: Path, header: bytes, values: bytes, says: str
) -> None:
    with pytest.raises(fetch.DataUnavailable, match=rf"a\.gz: {says}"):
        fashion.read_idx(idx(tmp_path / "a.gz", header, values))


def test_names_a_file_that_is_not_gzip(fashion: ModuleType, fetch: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(1000))[:-9])
    with pytest.raises(fetch.DataUnavailable, match=r"a\.gz: not a complete gzip file"):
        fashion.read_idx(tmp_path / "a.gz")


def test_images_are_balanced_and_scaled(fashion: ModuleType, fashion_data: None) -> None:
    images, classes = fashion.load("test")
    assert images.shape == (10_000, 1, 28, 28)
    assert images.dtype == torch.float32
    assert classes.bincount().tolist() == [1000] * 10
    assert abs(images.mean().item()) < 0.01
    assert abs(images.std().item() - 1) < 0.01


@pytest.mark.parametrize("name", NAMES)
def test_learns_and_repeats(train_fashion: ModuleType, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(256) % 10
    images = torch.randn(10, 1, 28, 28, generator=generator)[classes]
    images += 0.3 * torch.randn(images.shape, generator=generator)

    def train() -> torch.nn.Module:
        torch.manual_seed(0)
        model = train_fashion.MODELS[name]()
        train_fashion.fit(model, images, classes, epochs=15, learning_rate=0.01, progress=None)
        return model

    first, second = train(), train()
    assert not first.training
    assert train_fashion.accuracy(first, images, classes) > 0.5  # chance is 0.1
    for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_keeps_what_it_trained(train_fashion: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images, classes = torch.randn(128, 1, 28, 28), torch.arange(128) % 10
    asked = []

    def load(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(split)
        return images, classes

    monkeypatch.setattr(train_fashion.fashion, "load", load)
    first = train_fashion.trained("depthwise", epochs=1, progress=False)
    again = train_fashion.trained("depthwise", epochs=1, progress=False)
    assert asked == ["train"]
    for one, other in zip(first.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    other_seed = train_fashion.trained("depthwise", seed=1, epochs=1, progress=False)
    assert not torch.equal(first.head.weight, other_seed.head.weight)
    kept = sorted(path.name for path in (tmp_path / "octet" / "trained").iterdir())
    assert len(kept) == 2  # and no half of a file
