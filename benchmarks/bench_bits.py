"""Dynamic layers of 8 and of 4 bits: time, error, bytes, and the bandwidth that is reached (`make bench-bits`).

    python benchmarks/bench_bits.py                 # every row, on one thread and on two
    python benchmarks/bench_bits.py --only LSTM     # rows whose name holds a text
    python benchmarks/bench_bits.py --threads 4     # on so many threads

The contenders of a row take turns, timed on the calling thread's CPU clock where one thread computes. Beside the Linear
layers of one input row a plain read of as many bytes takes its turns: the sum of a float32 tensor, by torch. Exit
status 1 where a goal is not reached.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import display
import harness
import torch
from torch import Tensor, nn

import quant

EIGHT, FOUR, GROUPS, READ = "8 bits", "4 bits", "4 bits, groups of 64", "read"
SETTINGS = {EIGHT: {}, FOUR: {"weight_bits": 4}, GROUPS: {"weight_bits": 4, "group_size": 64}}

BANDWIDTH_GOAL = 0.85
"""Least share of the bandwidth of a plain read, of a decoding step's layers that are larger than the caches."""

BYTES_GOAL = 0.145
"""Most bytes of a layer of 4 bits in groups of 64, in memory, over those of float32."""

EFFORT = harness.Effort(seconds=4.0, rounds=15, patience=1.0)


@dataclass(frozen=True)
class Row:
    """A case: the layers, an input, and the least ratio of 8 bits' time to that of 4 bits.

    Attributes:
        reads: whether the time goes into reading weights from memory, so that bandwidth is asked.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    goal: float | None = None
    reads: bool = False


class Layers(nn.Module):
    """As many Linear layers as exceed the caches, called one after the other: what a decoding step reads."""

    def __init__(self, size: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Recurrent(nn.Module):
    """The sequence that a recurrent layer gives."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


ROWS = (
    Row("Linear, 16 of 4096, 1 row", lambda: Layers(4096, 16), (1, 4096), reads=True),
    Row("Linear, 16 of 4096, 4 rows", lambda: Layers(4096, 16), (4, 4096)),
    Row("Linear, 2048, 128 rows", lambda: Layers(2048, 1), (128, 2048)),
    Row("LSTM 1024, 1 x 64 steps", lambda: Recurrent(nn.LSTM(1024, 1024)), (64, 1, 1024), goal=1.6),
    Row("LSTM 2048, 1 x 64 steps", lambda: Recurrent(nn.LSTM(2048, 2048)), (64, 1, 2048), goal=1.8),
    Row("GRU 1024, 1 x 64 steps", lambda: Recurrent(nn.GRU(1024, 1024)), (64, 1, 1024)),
)


def measured(row: Row) -> harness.Race:
    """The race of 8 bits and of 4, and of a plain read where the row reads."""
    torch.manual_seed(0)
    model, x = row.make().eval(), torch.randn(row.shape)
    expected = model(x)
    contenders, sizes = [], {}
    for name, settings in SETTINGS.items():
        q = quant.quantize_dynamic(model, quant.Recipe(default=quant.QConfig(**settings)))
        error = float((q(x) - expected).norm() / expected.norm())
        contenders.append(harness.Contender(name, lambda q=q: q(x), error=error))
        summary = quant.summary(q)
        # A call reads the packed copies of bytes; of 4 bits what is stored, and the little that is packed beside it.
        sizes[name] = summary.bytes_packed + (0 if name == EIGHT else summary.bytes_after)
        sizes["float"] = summary.bytes_before
    if row.reads:
        reals = torch.ones(sizes[GROUPS] // 4)
        contenders.append(harness.Contender(READ, reals.sum))
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    return harness.race(row.name, contenders, effort=EFFORT, shape={"input": row.shape, "bytes": sizes}, clock=clock)


def report(row: Row, race: harness.Race) -> tuple[list[list[str]], bool]:
    """Lines of the table, and whether the row's goals are reached."""
    sizes, lines, good = race.shape["bytes"], [], True
    for name in SETTINGS:
        ratio, said = race.ratio(EIGHT, name), []
        if name != EIGHT and row.goal is not None:
            reached = ratio.high >= row.goal
            good &= reached
            said.append(f"{'reached' if reached else 'NOT reached'}: {row.goal}")
        share = ""
        if row.reads:
            rate = sizes[name] / race.time(name).median
            of_read = rate / (sizes[GROUPS] / race.time(READ).median)
            share = f"{rate / 1e9:.1f} GB/s, {of_read:.2f} of a read"
            if name != EIGHT:
                good &= of_read >= BANDWIDTH_GOAL
                said.append(f"{'reached' if of_read >= BANDWIDTH_GOAL else 'NOT reached'}: {BANDWIDTH_GOAL}")
        if name == GROUPS and sizes[name] > BYTES_GOAL * sizes["float"]:
            good = False
            said.append(f"NOT reached: {BYTES_GOAL} of the bytes")
        error = race.errors[name]
        lines.append(
            [
                row.name,
                str(torch.get_num_threads()),
                name,
                display.duration(race.time(name).median),
                f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
                f"{error:.3f}",
                f"{sizes[name] / sizes['float']:.3f}",
                share,
                ", ".join(said),
            ]
        )
    return lines, good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads, one after the other"
    )
    options = parser.parse_args()
    lines, good = [], True
    with torch.inference_mode():
        for threads in options.threads:
            torch.set_num_threads(threads)
            for row in ROWS:
                if options.only in row.name:
                    more, reached = report(row, measured(row))
                    lines, good = lines + more, good and reached
    header = (
        "layers",
        "threads",
        "weights",
        "time",
        "8 bits' time over it",
        "error",
        "bytes of float's",
        "reads",
        "goals",
    )
    print(display.table(header, lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
