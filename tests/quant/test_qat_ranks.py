"""Training on several ranks: one range for all, that of the joint batch; two gloo processes of two_ranks.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quant

from . import two_ranks

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch was built without gloo",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "error", two_ranks.__file__, str(folder)]
    started = [subprocess.Popen([*command, str(rank)], cwd=folder, stderr=subprocess.PIPE) for rank in range(2)]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(text.decode()[-3000:] for text in said)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine["model"].keys() == theirs["model"].keys()
    for key, value in mine["model"].items():
        assert torch.equal(value, theirs["model"][key]), key


@pytest.mark.parametrize("kind", two_ranks.KINDS)
def test_two_ranks_are_one_process_with_the_joint_batch(ranks: list[dict[str, Any]], kind: str) -> None:
    """The second rank's batches are ten times as large: with rank 0's ranges most of its values would clamp."""
    assert_same(ranks[0][kind], ranks[1][kind])
    one = two_ranks.Run(kind, None).until(two_ranks.STEPS).state()
    for key, value in one["model"].items():
        torch.testing.assert_close(ranks[0][kind]["model"][key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_ranges_of_each_rank_alone_are_said(ranks: list[dict[str, Any]]) -> None:
    """The counter-example: nobody asked for joint ranges, each rank has its own, and that is said once."""
    for rank in ranks:
        [said] = rank["alone"]["said"]
        assert "trains on one of 2 ranks" in said
        assert "sync_ranges(prepared)" in said
    key = "_quant.observers.x_0.observer.high"
    own = [float(rank["alone"]["model"][key]) for rank in ranks]
    assert own[1] > 1.05 * own[0], own


@pytest.mark.parametrize("stop", [1, 6])
def test_a_run_on_ranks_that_is_resumed_equals_an_unbroken_one(ranks: list[dict[str, Any]], stop: int) -> None:
    for rank in ranks:
        broken, unbroken = rank[f"resumed {stop}"], rank["moving_average"]
        assert_same(broken, unbroken)
        assert broken["schedule"] == unbroken["schedule"]
        mine, theirs = broken["optimizer"]["state"], unbroken["optimizer"]["state"]
        assert all(torch.equal(mine[one]["momentum_buffer"], theirs[one]["momentum_buffer"]) for one in theirs)


@pytest.mark.parametrize("kind", ["moving_average", "lsq"])
def test_sharded_parameters_train_alike(ranks: list[dict[str, Any]], kind: str) -> None:
    """FSDP2, with the ranges of the joint batch, from the second batch on."""
    assert_same(ranks[0][f"sharded {kind}"], ranks[1][f"sharded {kind}"])
    one = two_ranks.unsharded(kind)["model"]
    for key, value in one.items():
        torch.testing.assert_close(ranks[0][f"sharded {kind}"]["model"][key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_learned_ranges_need_unused_parameters(ranks: list[dict[str, Any]]) -> None:
    assert "pass find_unused_parameters=True to DistributedDataParallel" in ranks[0]["refused"]


def test_a_norm_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would normalise by each rank's own batch in silence."""
    x = torch.randn(6, 5)
    prepared = quant.prepare_qat(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), x).train()
    prepared = nn.SyncBatchNorm.convert_sync_batchnorm(prepared)
    prepared(x)  # one process
    monkeypatch.setattr(quant.qat.batch_norm, "several", lambda: True)
    with pytest.raises(ValueError, match="layer '0': a SyncBatchNorm that is folded"):
        prepared(x)


def test_ranges_of_another_model_are_not_synced() -> None:
    with pytest.raises(ValueError, match=r"expected a model from quant\.prepare_qat"):
        quant.qat.sync_ranges(two_ranks.Net())
