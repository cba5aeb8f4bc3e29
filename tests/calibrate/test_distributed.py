"""Two and three gloo processes, each with its shard, against one process with all data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quant.calibrate import distributed
from quant.kernels import weight_scheme
from quant.observers import OBSERVERS, HistogramObserver, MinMaxObserver, make_observer
from torch import Tensor, nn

from quant import calibrate

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
ENDS = {"fixed": {"low": 0.0, "high": 1.0}}
"""What observers need that have no default for it."""


class Net(nn.Module):
    """Every observer there is, and some per channel."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.points = nn.ModuleDict({name: make_observer(name, **ENDS.get(name, {})) for name in OBSERVERS})
        self.channels = HistogramObserver(weight_scheme(8, axis=1), bins=64)
        self.extremes = MinMaxObserver(weight_scheme(8, axis=1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for point in [*self.points.values(), self.channels, self.extremes]:
            x = point(x)
        return x


def data() -> list[Tensor]:
    """Of very different sizes, so that histograms of different widths meet; one batch with NaN."""
    batches = list(torch.randn(9, 5, 3, generator=torch.Generator().manual_seed(0)))
    batches = [batch * 10.0 ** (index % 4) for index, batch in enumerate(batches)]
    batches[4][0, 0] = torch.nan
    return batches


def exact(model: nn.Module) -> dict[str, Tensor]:
    """The statistics that do not depend on the order of the batches."""
    return {name: value for name, value in model.state_dict().items() if "moving_average" not in name}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


RANKS = """
import importlib.util, os, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from pathlib import Path
from quant import calibrate
from quant.calibrate import distributed
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("under_test", sys.argv[1])
this = importlib.util.module_from_spec(spec)
spec.loader.exec_module(this)
rank, ranks, folder = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)

def run(net, shard, **options):
    return calibrate.run(net, shard, progress=False, **options)

def one(*runs):
    net = this.Net()
    for batches in runs:
        calibrate.driver._Run(net, lambda model, x: model(x), None, 0).drive(batches, None, False)
    return this.exact(net)

def agree(net):
    mine = distributed.checkpoint.digest("", net.state_dict())
    assert len(set(distributed.gather(mine.encode()))) == 1, "ranks differ"

def refused(message, work):
    try:
        work()
    except calibrate.CalibrationError as error:
        assert message in str(error), error
    else:
        raise AssertionError("nothing was raised")

batches, all_data = this.data()[rank::ranks], this.data()

# Shards of different sizes: equal to one process.
net = this.Net()
done = run(net, batches)
assert (done.batches, done.samples) == (9, 45), done
agree(net)
assert this.differences(this.exact(net), one(all_data)) == []
average = net.points["moving_average"]

# Which rank has which shard does not matter, not even to the moving average.
other = this.Net()
run(other, this.data()[(ranks - 1 - rank)::ranks])
assert this.differences(other.state_dict(), net.state_dict()) == []
assert average.batches == 9

# sync after run changes nothing; nor does it count twice what an earlier run has seen.
before = {name: value.clone() for name, value in net.state_dict().items()}
calibrate.sync(net)
assert this.differences(net.state_dict(), before) == []
run(net, batches)
agree(net)
assert this.differences(this.exact(net), one(all_data, all_data)) == []
assert average.batches == 18

# Everything on rank 0, an empty shard on the others.
net = this.Net()
done = run(net, all_data if rank == 0 else [])
assert done.batches == 9
agree(net)
assert this.differences(this.exact(net), one(all_data)) == []

# Equal shards count once each in run.
net = this.Net()
run(net, all_data[:2])
assert this.differences(this.exact(net), one(all_data[:2] * ranks)) == []

# Observers that were fed by hand.
net = this.Net()
for batch in batches:
    net(batch)
calibrate.sync(net)
agree(net)
assert this.differences(this.exact(net), one(all_data)) == []

# No data anywhere, an error on one rank, other weights, another observer: every rank hears of it, none waits.
try:
    run(this.Net(), [])
except ValueError as error:
    assert "batches is empty" in str(error)
net = this.Net()
run(net, all_data[:1])
seen = int(net.channels.counts.sum())
bad = [*batches, torch.zeros(2, 7)] if rank == 0 else batches
refused("batch 3, float32 [2, 7]" if ranks == 3 else "batch 5, float32 [2, 7]", lambda: run(net, bad))
assert int(net.channels.counts.sum()) > seen, "what was seen before the failed run is lost"
refused("the model of rank 1 is not that of rank 0", lambda: run(this.Net(1.0 + (rank == 1)), batches))
half = this.Net()
if rank == 1:
    half.extremes = this.HistogramObserver()
refused("the model of rank 1 is not that of rank 0", lambda: calibrate.sync(half))

# A checkpoint per rank; a resumed run is merged once.
path = folder / "state.ckpt"
net = this.Net()
run(net, batches[:2], checkpoint=path, checkpoint_every=0)
assert (folder / f"state.rank{rank}of{ranks}.ckpt").exists()
net = this.Net()
done = run(net, batches, checkpoint=path, checkpoint_every=0)
assert (done.resumed, done.batches) == (2, 9)
agree(net)
assert this.differences(this.exact(net), one(all_data)) == []
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [2] if FAST else [2, 3])
def test_ranks_hold_what_one_process_would(ranks: int, tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, __file__, str(rank), str(ranks), str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)


def test_the_merge_of_moving_averages_is_the_mean_weighted_by_batches() -> None:
    """What the README says of it, with the numbers of two shards."""
    first, second = Net().points["moving_average"], Net().points["moving_average"]
    for _ in range(3):
        first(torch.tensor([0.0, 1.0]))
    second(torch.tensor([0.0, 5.0]))
    first.merge(second)
    assert first.high.item() == pytest.approx((3 * 1.0 + 1 * 5.0) / 4)
    assert first.batches == 4


def test_without_a_process_group_sync_does_nothing() -> None:
    net = Net()
    net(data()[0])
    before = {name: value.clone() for name, value in net.state_dict().items()}
    calibrate.sync(net)
    assert differences(net.state_dict(), before) == []
    assert distributed.world() == (0, 1)
