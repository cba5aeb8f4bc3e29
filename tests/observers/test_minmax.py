"""MinMaxObserver: the extremes, exactly, and jointly over ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from quant.kernels import ACTIVATION_U8, choose_qparams
from quant.observers import MinMaxObserver


def test_keeps_the_extremes_of_all_batches() -> None:
    observer = MinMaxObserver()
    for batch in ([1.0, 2.0], [-5.0, 0.0], [0.5, 0.5]):
        observer(torch.tensor(batch))
    low, high = observer.range()
    assert (float(low), float(high)) == (-5.0, 2.0)
    assert observer.qparams() == choose_qparams(torch.tensor(-5.0), torch.tensor(2.0), ACTIVATION_U8)


def test_distributed_without_a_process_group_is_local() -> None:
    observer = MinMaxObserver(distributed=True)
    observer(torch.tensor([1.0]))
    assert [float(end) for end in observer.range()] == [1.0, 1.0]


TWO_RANKS = """
import sys, torch
from dataclasses import replace
from quant.kernels import ACTIVATION_U8
from quant.observers import FakeQuantize, MinMaxObserver, MovingAverageObserver

rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
batches = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 7).view(6, 1, 1)
nan = torch.full((1, 3), float("nan"))
for make in (
    lambda **o: MinMaxObserver(**o),
    lambda **o: MovingAverageObserver(momentum=0.3, **o),
    lambda **o: MinMaxObserver(replace(ACTIVATION_U8, axis=1), **o),
    lambda **o: FakeQuantize(MovingAverageObserver(**o)),
):
    joint, mine = make(), make(distributed=True)
    for step, batch in enumerate(batches):
        out = joint(batch)
        part = batch[rank * 2 : rank * 2 + 2]
        if rank == 1 and step == 3:  # a rank whose batch is useless must neither hang the other nor lose its range
            part = torch.cat((nan, part)) if not isinstance(mine, FakeQuantize) else part
        same = mine(part)
        if isinstance(mine, FakeQuantize):
            assert torch.equal(same, out[rank * 2 : rank * 2 + 2])
    if rank == 0:
        mine(batches[0][:0])
    else:
        mine(batches[5])
    joint(batches[5])
    assert torch.equal(joint.qparams().scale, mine.qparams().scale), (joint, mine)
    assert torch.equal(joint.qparams().zero_point, mine.qparams().zero_point)
torch.distributed.destroy_process_group()
"""


def test_two_ranks_keep_the_range_of_the_joint_batch(tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks = [
        subprocess.Popen([sys.executable, "-c", TWO_RANKS, str(rank), str(store)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
