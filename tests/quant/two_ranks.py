"""What tests/quant/test_qat_ranks.py runs in each of two gloo processes: trainings, whose states it saves to a file.

python two_ranks.py FOLDER RANK
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import quant
from quant.recipe import QConfig, Recipe

KINDS = ("moving_average", "minmax", "lsq", "lsq+", "pact")
STEPS, BATCH = 8, 8


class Net(nn.Module):
    """No batch norm: its statistics are each rank's own, in float as here. The concatenation has one range."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.side = nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 3)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((F.relu(self.conv(x)), 3.0 * self.side(x)), dim=1)
        return self.head(x.mean(dim=(2, 3)))


def batches() -> Tensor:
    """(steps, batch, ...); the second half of a batch, which is rank 1's, is ten times as large."""
    noise = torch.randn(STEPS, BATCH, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return noise * torch.tensor([0.1] * 4 + [1.0] * 4).reshape(1, BATCH, 1, 1, 1)


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    learned = kind in ("lsq", "lsq+")
    qconfig = QConfig(activation_observer=kind, weight_observer=kind if learned else "minmax")
    return quant.prepare_qat(Net(), batches()[0], Recipe(default=qconfig)).train()


class Run:
    """A training of `made(kind)`, on all of each batch or on a rank's half; with what is needed to stop and resume."""

    def __init__(self, kind: str, rank: int | None, *, sync: bool | None = None, **options: Any) -> None:
        self.model, self.rank = made(kind), rank
        find = kind in ("lsq", "lsq+", "pact")  # learned ranges have no gradient before rounding and when frozen
        self.wrapped = self.model if rank is None else DistributedDataParallel(self.model, find_unused_parameters=find)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.schedule = quant.QATSchedule(self.wrapped, STEPS, sync=sync, **options)

    def until(self, step: int) -> Run:
        for x in batches()[self.schedule.count : step]:
            labels = torch.arange(BATCH) % 4
            if self.rank is not None:
                part = slice(4 * self.rank, 4 * self.rank + 4)
                x, labels = x[part], labels[part]
            self.optimizer.zero_grad()
            F.cross_entropy(self.wrapped(x), labels).backward()
            self.optimizer.step()
            self.schedule.step()
        return self

    def state(self) -> dict[str, Any]:
        states = self.model.state_dict(), self.optimizer.state_dict(), self.schedule.state_dict()
        return copy.deepcopy(dict(zip(("model", "optimizer", "schedule"), states, strict=True)))

    def load(self, state: dict[str, Any]) -> Run:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        return self


def resumed(rank: int, stop: int) -> dict[str, Any]:
    saved = Run("moving_average", rank).until(stop).state()
    return Run("moving_average", rank).load(saved).until(STEPS).state()


def alone(rank: int) -> dict[str, Any]:
    """Without a word about ranks: what was said, and each rank's last ranges before rank 0's overwrite them."""
    model = DistributedDataParallel(made("moving_average"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batches()[0][4 * rank : 4 * rank + 4])
        model(batches()[0][4 * rank : 4 * rank + 4])
    said = [str(one.message) for one in caught if "ranks" in str(one.message)]
    return {"said": said, "model": copy.deepcopy(model.module.state_dict())}


def refused() -> str:
    model = DistributedDataParallel(made("lsq"))
    try:
        quant.QATSchedule(model, STEPS)
    except ValueError as error:
        return str(error)
    return ""


def sharded(rank: int, kind: str) -> dict[str, Any]:
    """Parameters, learned scales among them, as FSDP2 shards them: the first rounded batch, then fully_shard."""
    model = made(kind)
    quant.qat.sync_ranges(model)
    part = slice(4 * rank, 4 * rank + 4)
    model(batches()[0][part])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for x in batches()[1:]:
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), (torch.arange(BATCH) % 4)[part]).backward()
        optimizer.step()
    whole = {key: one.full_tensor() if hasattr(one, "full_tensor") else one for key, one in model.state_dict().items()}
    return {"model": {key: one.detach().clone() for key, one in whole.items()}}


def unsharded(kind: str) -> dict[str, Any]:
    """`sharded` in one process."""
    model = made(kind)
    model(batches()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for x in batches()[1:]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(BATCH) % 4).backward()
        optimizer.step()
    return {"model": model.state_dict()}


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    # find_unused_parameters warns in the steps in which all are used.
    warnings.filterwarnings("ignore", message="find_unused_parameters")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    found: dict[str, Any] = {kind: Run(kind, rank).until(STEPS).state() for kind in KINDS}
    found["alone"] = alone(rank)
    found["refused"] = refused()
    found |= {f"resumed {stop}": resumed(rank, stop) for stop in (1, 6)}
    found |= {f"sharded {kind}": sharded(rank, kind) for kind in ("moving_average", "lsq")}
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
