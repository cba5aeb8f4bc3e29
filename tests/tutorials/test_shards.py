"""Calibration over streamed shards by torchrun, on a small network without data."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from .conftest import TUTORIALS, load


@pytest.fixture(scope="module")
def shards(zoo: ModuleType) -> ModuleType:
    return load("octet_shards", TUTORIALS / "shards.py")


def test_shards_hold_every_image_once_whoever_reads_them(shards: ModuleType, tmp_path: Path) -> None:
    images = torch.rand(2 * shards.SHARD + 40, 1, 4, 4)
    paths = shards.write_shards(tmp_path, images, torch.arange(len(images)))
    assert len(paths) == 3
    read = list(shards.Shards(tmp_path, 0, 1))
    assert torch.equal(torch.cat(read), images)
    assert [len(batch) for batch in read[-2:]] == [32, 8]
    parts = [list(shards.Shards(tmp_path, rank, 2)) for rank in (0, 1)]
    assert sorted(float(batch.sum()) for part in parts for batch in part) == sorted(float(one.sum()) for one in read)
    assert [len(part) for part in parts] == [8 + 2, 8]


def test_a_killed_rank_changes_no_range(shards: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    images = torch.rand(4 * shards.SHARD, 1, 28, 28)
    shards.run(images, torch.zeros(len(images), dtype=torch.int64), shards.SMALL, [2], tmp_path, every=0, kills=[True])
    assert "rank 1 killed at its batch 8: the same ranges" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "ranks"), [(256, [1, 2]), (0, [1]), (512, [2, 0])])
def test_ranks_without_a_shard_are_refused(count: int, ranks: list[int], shards: ModuleType, tmp_path: Path) -> None:
    images = torch.rand(count, 1, 28, 28)
    with pytest.raises(ValueError, match=f"{count} images are .* take more --images or fewer --ranks"):
        shards.run(images, torch.zeros(count), shards.SMALL, ranks, tmp_path)
    assert not list(tmp_path.iterdir())


def test_few_samples_have_nearly_the_ranges_of_all(shards: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = torch.rand(512, 1, 28, 28)
    off = shards.enough(images, shards.SMALL, [32, 512])
    assert off[512] == 0
    assert 0 < off[32] < 30
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    shards.draw(tmp_path / "plot.svg", off)
    assert (tmp_path / "plot.svg").stat().st_size > 1000
