"""What calibrating costs: a forward with observers against plain float and torch.ao (`make bench-calibration`).

Each contender runs the same images; ours and torch.ao's watch with their default, a histogram. Exit status 1 when ours
takes more than LIMIT times the float model's time, is slower than torch.ao, or keeps more after 100 batches than after
one.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import display
import harness
import networks
import torch
from quant.observers import Observer
from torch import Tensor, nn

import quant

OURS, FLOAT, AO = "octet", "float", "ao histogram"

LIMIT = 1.15
"""Most time of ours, in times of the float model's."""

MARKS = (1, 10, 100)
"""Batches after which memory is read."""

PAGE = 4096
FULL = harness.Effort(seconds=12.0, rounds=15, patience=4.0)
QUICK = harness.Effort(seconds=3.0, rounds=5, patience=3.0)

LEGEND = f"""
time: median of one forward of the batch
ratio: over the float model's time in the same round, median over rounds [{harness.CONFIDENCE:.0%} interval]
ok: ours, with its whole interval, is at most {LIMIT} times float, and below torch.ao"""


@dataclass(frozen=True)
class Memory:
    """Bytes after so many batches: of the observers' buffers, and of the whole process."""

    batches: int
    statistics: int
    process: int | None


def settled(model: nn.Module, x: Tensor) -> nn.Module:
    """The model with batch norms that fit its random weights: every layer sees values of a trained one's size."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    model.train()(x)
    return model.eval()


def torch_ao(model: nn.Module, x: Tensor) -> nn.Module:
    """torch.ao's FX preparation with its default observers for x86."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated: that is why we are here
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import prepare_fx

        prepared: nn.Module = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    return prepared


def memory(prepared: nn.Module, batches: Sequence[Tensor]) -> list[Memory]:
    """What is held after each of MARKS batches."""
    observers = [module for module in prepared.modules() if isinstance(module, Observer)]
    found = []
    for count in range(1, MARKS[-1] + 1):
        prepared(batches[count % len(batches)])
        if count in MARKS:
            held = sum(buffer.nbytes for observer in observers for buffer in observer.buffers())
            found.append(Memory(count, held, resident()))
    return found


def resident() -> int | None:
    """Bytes of this process in memory; None where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * PAGE
    except OSError:
        return None


def cycling(model: nn.Module, batches: Sequence[Tensor]) -> Callable[[], object]:
    """A call that runs the next of the batches: an observer that had seen its input before would have less to do."""
    state = iter(range(2**62))
    return lambda: model(batches[next(state) % len(batches)])


def run(name: str, batch: int, effort: harness.Effort) -> tuple[harness.Race, list[Memory]]:
    """Measure one network."""
    torch.manual_seed(0)
    batches = [torch.randn(batch, 3, 224, 224) * (1 + index / 4) for index in range(4)]
    model = settled(networks.NETWORKS[name](), batches[0])
    prepared = quant.prepare(model, batches[0])
    held = memory(prepared, [images[:1] for images in batches])
    models = {FLOAT: model, OURS: prepared, AO: torch_ao(model, batches[0])}
    race = harness.race(
        name,
        [harness.Contender(contender, cycling(made, batches)) for contender, made in models.items()],
        effort=effort,
        shape={"batch": batch, "image": 224},
        undecided=lambda race: "unsure" in verdict(race, held),
        clock=harness.clock_for(torch.get_num_threads()),
    )
    return race, held


def verdict(race: harness.Race, held: Sequence[Memory]) -> str:
    """ "ok", or what is wrong; unsure: the limit lies within the interval."""
    wrong = []
    ours, peer = race.ratio(OURS, FLOAT), race.ratio(AO, OURS)
    if ours.high > LIMIT:
        wrong.append(f"ABOVE {LIMIT} x float" if ours.low > LIMIT else f"unsure: {LIMIT} x float")
    if peer.low < 1:
        wrong.append(f"SLOWER than {AO}" if peer.high < 1 else f"unsure: {AO}")
    if len({mark.statistics for mark in held}) > 1:
        wrong.append("its statistics GROW")
    return "; ".join(wrong) or "ok"


def report(races: Sequence[harness.Race], held: Sequence[Sequence[Memory]]) -> str:
    """The two tables."""
    names = (FLOAT, OURS, AO)
    rows = []
    for race, marks in zip(races, held, strict=True):
        times = [display.duration(race.time(name).median) for name in names]
        ratios = [
            f"{r.median:.2f} [{r.low:.2f}, {r.high:.2f}]" for r in (race.ratio(name, FLOAT) for name in names[1:])
        ]
        rows.append([race.case, *times, *ratios, f"{race.cpu_share:.0%}", verdict(race, marks)])
    times_table = display.table(
        ["network", *names, *(f"{name}/{FLOAT}" for name in names[1:]), "core", "verdict"], rows
    )
    header = ["network", *(f"{mark} batches" for mark in MARKS), *(f"process, {mark}" for mark in MARKS)]
    cells = [
        [race.case, *(_mebibytes(mark.statistics) for mark in marks), *(_mebibytes(mark.process) for mark in marks)]
        for race, marks in zip(races, held, strict=True)
    ]
    return (
        f"{times_table}\n{LEGEND}\n\nmemory of the statistics, and of the whole process\n{display.table(header, cells)}"
    )


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.2f} MiB"


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 when every row is ok."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, wider intervals")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4, help="images at a time")
    options = parser.parse_args(arguments)
    facts = harness.machine([], options.threads, harness.pin(options.threads))
    print(harness.describe(facts) + "\n")
    with torch.no_grad():
        found = [run(name, options.batch, QUICK if options.quick else FULL) for name in networks.NETWORKS]
    races, held = [race for race, _ in found], [marks for _, marks in found]
    print(report(races, held))
    content = {
        "machine": facts,
        "limit": LIMIT,
        "cases": [
            {**race.to_dict(), "memory": [vars(mark) for mark in marks], "verdict": verdict(race, marks)}
            for race, marks in found
        ],
    }
    path = harness.save("bench_calibration", content)
    print(f"\nraw numbers: {path.relative_to(harness.RESULTS.parents[1])}")
    return 0 if all(verdict(race, marks) == "ok" for race, marks in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
