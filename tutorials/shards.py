"""Calibrate over several processes on streamed shards, with one of them killed: the ranges are those of one process.

    python tutorials/shards.py [--ranks 2 4] [--out FILE.svg]

Images go into tar shards as WebDataset has them, and every rank of torchrun streams its own (no index, no seek). One
rank is killed half-way; torch elastic starts all of them again, and each goes on from its checkpoint. Then the ranges
are compared with those of one process, to the bit. At the end: how far the ranges of fewer samples
are from these. It ends in asserts.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

import quant

OUT = Path(__file__).parent / "out" / "shards.svg"
BATCH, SHARD = 32, 256
"""Images of a batch, and of a shard: shards are whole batches, so that any split has the same ones."""
SMALL = "small"
"""In place of a network's name: a smaller one, and random images, for a try without data."""


def write_shards(folder: Path, images: Tensor, classes: Tensor) -> list[Path]:
    """Write `000000.npy` and `000000.cls` for each image, float32 (N, 1, 28, 28), into shards of SHARD images."""
    paths = []
    for begin in range(0, len(images), SHARD):
        paths.append(folder / f"images-{begin // SHARD:05}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for index in range(begin, min(begin + SHARD, len(images))):
                stream = io.BytesIO()
                numpy.save(stream, images[index].numpy())
                for suffix, data in (("npy", stream.getvalue()), ("cls", str(int(classes[index])).encode())):
                    member = tarfile.TarInfo(f"{index:06}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return paths


class Shards:
    """Batches of the shards of one rank, read front to back: each iteration begins anew, in the same order."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.paths = sorted(folder.glob("*.tar"))[rank::ranks]

    def __iter__(self) -> Iterator[Tensor]:
        for path in self.paths:
            batch = []
            with tarfile.open(path, "r|") as tar:  # a stream: a pipe from a store would do
                for member in tar:
                    content = tar.extractfile(member) if member.name.endswith(".npy") else None
                    if content is not None:
                        batch.append(torch.from_numpy(numpy.load(io.BytesIO(content.read()), allow_pickle=False)))
                    if len(batch) == BATCH:
                        yield torch.stack(batch)
                        batch = []
            if batch:
                yield torch.stack(batch)


def network(name: str) -> nn.Module:
    """A network of models.py, the same on every rank: its weights are random, which changes nothing here."""
    torch.manual_seed(0)
    if name != SMALL:
        from models import MODELS

        return MODELS[name]().eval()
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)).eval()


def calibrated(
    batches: object, model: nn.Module, checkpoint: Path | None = None, every: float = 1.0
) -> tuple[nn.Module, int]:
    """The model with its ranges, and how many batches a checkpoint had; one is written after so many seconds."""
    prepared = quant.prepare(model, torch.zeros(BATCH, 1, 28, 28))
    done = quant.calibrate.run(prepared, batches, progress=False, checkpoint=checkpoint, checkpoint_every=every)
    return prepared, done.resumed


def killed_at(batches: Iterable[Tensor], place: int) -> Iterator[Tensor]:
    """The batches, until this process is killed as by a machine that goes away: nothing of it gets to say goodbye."""
    for index, batch in enumerate(batches):
        if index == place:
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def rank_of_torchrun(options: argparse.Namespace) -> None:
    """What each process does that torchrun starts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches: Iterable[Tensor] = Shards(options.folder, rank, ranks)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dies = first and options.kill_at is not None and rank == ranks - 1
    model = network(options.network)
    if dies:
        batches = killed_at(batches, options.kill_at)
    prepared, resumed = calibrated(batches, model, options.state / "state.safetensors", options.checkpoint_every)
    (options.state / f"resumed-{rank}").write_text(str(resumed))
    if rank == 0:
        quant.calibrate.save_ranges(prepared, options.ranges)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Run:
    """One torchrun.

    Attributes:
        ranges: the text of the file of ranges.
        seconds: from the start of torchrun to its end.
        resumed: batches that each rank's checkpoint already had in the last attempt.
    """

    ranges: str
    seconds: float
    resumed: tuple[int, ...]


def torchrun(folder: Path, ranks: int, name: str, kill_at: int | None, every: float) -> Run:
    """Calibrate by several processes on this machine, restarted once if one dies."""
    with tempfile.TemporaryDirectory() as state:
        file = Path(state) / "ranges.json"
        own = ["rank", "--folder", str(folder), "--state", state, "--ranges", str(file), "--network", name]
        own += ["--checkpoint-every", str(every)]
        own += [] if kill_at is None else ["--kill-at", str(kill_at)]
        elastic = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1", "--monitor-interval", "0.1"]
        # Else a restart finds the addresses of the attempt before in the store, and calls processes that are gone.
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *elastic, __file__, *own],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        if done.returncode:
            raise RuntimeError(f"torchrun ended with status {done.returncode}:\n{done.stderr[-9000:]}")
        resumed = tuple(int((Path(state) / f"resumed-{rank}").read_text()) for rank in range(ranks))
        return Run(file.read_text(), time.perf_counter() - began, resumed)


def run(
    images: Tensor,
    classes: Tensor,
    name: str,
    ranks: Sequence[int],
    folder: Path,
    every: float = 1.0,
    kills: Sequence[bool] = (False, True),
) -> None:
    """Calibrate in one process, then by ranks without and with a kill; all must have the same ranges.

    Args:
        every: seconds between two checkpoints of a rank; 0 writes one after each batch.

    Raises:
        ValueError: a rank would have no shard, and nothing to be killed at.
    """
    if min(ranks) < 1 or len(images) <= SHARD * (max(ranks) - 1):
        raise ValueError(
            f"{len(images)} images are {-(-len(images) // SHARD)} shards for {', '.join(map(str, ranks))} ranks, "
            "expected one or more for each of one or more ranks: take more --images or fewer --ranks"
        )
    shards = write_shards(folder, images, classes)
    began = time.perf_counter()
    quant.calibrate.save_ranges(calibrated(Shards(folder, 0, 1), network(name))[0], folder / "one.json")
    expected = (folder / "one.json").read_text()
    print(f"{len(images):,} images in {len(shards)} shards; one process: {time.perf_counter() - began:.1f} s")
    for count in ranks:
        half = sum(1 for _ in Shards(folder, count - 1, count)) // 2
        for kill_at in (half if kill else None for kill in kills):
            found = torchrun(folder, count, name, kill_at, every)
            assert found.ranges == expected, f"{count} ranks have other ranges than one process"
            killed = "" if kill_at is None else f", rank {count - 1} killed at its batch {kill_at}"
            resumed = "" if kill_at is None else f"; went on from batches {', '.join(map(str, found.resumed))}"
            print(f"{count} ranks{killed}: the same ranges, {found.seconds:.1f} s{resumed}")
            assert kill_at is not None or not any(found.resumed)
            if every == 0 and kill_at is not None:  # else it may have died before its first checkpoint
                assert found.resumed[-1] == kill_at


def enough(images: Tensor, name: str, counts: Sequence[int]) -> dict[int, float]:
    """By how much the ranges of the first samples differ from those of all, at most, in steps of the range of all."""

    def ends(count: int) -> Mapping[str, tuple[float, float]]:
        prepared, _ = calibrated(images[:count].split(BATCH), network(name))
        return {row.layer: (row.chosen_low, row.chosen_high) for row in quant.calibrate.ranges(prepared)}

    every = ends(len(images))
    off = {}
    for count in counts:
        some = ends(count)
        off[count] = max(
            abs(mine - one) / (high - low) * 255
            for name, (low, high) in every.items()
            for mine, one in zip(some[name], (low, high), strict=True)
        )
    return off


def draw(path: Path, off: Mapping[int, float]) -> None:
    """The largest change of a range over the number of samples."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.loglog(list(off), list(off.values()), "o-", color="#1f6f8b")
    axes.set(xlabel="samples", ylabel="steps of 8 bits, at most")
    axes.minorticks_off()
    axes.set_xticks(list(off), [str(count) for count in off])
    axes.set_yticks([5, 10, 20, 40], ["5", "10", "20", "40"])
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes (default 2 4)")
    parser.add_argument("--images", type=int, default=4096, help="to calibrate on (default 4096)")
    parser.add_argument("--network", default="residual", help=f"of models.py, or {SMALL!r} (default residual)")
    parser.add_argument("--out", type=Path, default=OUT, help="the plot (default tutorials/out)")
    verbs = parser.add_subparsers(dest="verb")
    rank = verbs.add_parser("rank", help="what torchrun starts")
    for name in ("folder", "state", "ranges"):
        rank.add_argument(f"--{name}", type=Path, required=True)
    rank.add_argument("--network", required=True)
    rank.add_argument("--checkpoint-every", type=float, required=True, help="seconds")
    rank.add_argument("--kill-at", type=int, help="the last rank's batch at which it is killed, the first time")
    options = parser.parse_args(arguments)
    if options.verb == "rank":
        rank_of_torchrun(options)
        return
    if options.network == SMALL:
        images, classes = torch.rand(options.images, 1, 28, 28), torch.zeros(options.images, dtype=torch.int64)
    else:
        from models import MODELS
        from zoo import fashion
        from zoo.fetch import DataUnavailable

        if options.network not in MODELS:
            parser.error(f"--network {options.network}: expected one of {', '.join([SMALL, *MODELS])}")
        try:
            images, classes = (data[: options.images] for data in fashion.load("test"))
        except DataUnavailable as error:
            sys.exit(f"shards: {error}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(images, classes, options.network, options.ranks, Path(folder))
        except ValueError as error:
            sys.exit(f"shards: {error}")
    off = enough(images, options.network, [2**power for power in range(5, 14) if 2**power < len(images)])
    for count, steps in off.items():
        print(f"{count:5} samples: a range is off by {steps:.2f} steps at most")
    draw(options.out, off)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
