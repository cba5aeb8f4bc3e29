"""distributed=True: two processes keep the ranges that one process has with the joint batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TWO_RANKS = """
import sys, torch
from dataclasses import replace
from quant.kernels import ACTIVATION_U8, weight_scheme
from quant.observers import FakeQuantize, LSQFakeQuantize, LSQPlusFakeQuantize
from quant.observers import MinMaxObserver, MovingAverageObserver

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
channels = replace(ACTIVATION_U8, axis=1)
for make in (
    lambda **o: LSQFakeQuantize(**o),
    lambda **o: LSQFakeQuantize(channels, channels=3, **o),
    lambda **o: LSQPlusFakeQuantize(**o),
    lambda **o: LSQPlusFakeQuantize(channels, channels=3, **o),
    lambda **o: LSQPlusFakeQuantize(weight_scheme(4, 1), channels=3, **o),
):
    joint, mine = make(), make(distributed=True)
    first = torch.cat((nan, batches[0]))
    joint(first)
    mine(first[:2] if rank else first[2:])
    empty = make(distributed=True)  # all of the data on one rank
    empty(first[:0] if rank else first)
    for other in (mine, empty):
        assert torch.allclose(joint.qparams().scale, other.qparams().scale, rtol=1e-6)
        assert torch.equal(joint.qparams().zero_point, other.qparams().zero_point)
    ranks = [torch.empty_like(mine.scale.data) for _ in range(2)]
    torch.distributed.all_gather(ranks, mine.scale.data)
    assert torch.equal(*ranks)
torch.distributed.destroy_process_group()
"""


def test_two_ranks_keep_the_range_of_the_joint_batch(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_RANKS, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
