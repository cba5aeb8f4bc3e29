"""What a training step costs over float, with torch.ao's in the same run: time, and memory at its peak."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import display
import harness
import networks
import torch
from bench_calibration import resident
from torch import Tensor, nn

import quant

FLOAT, OURS, AO = "float", "octet", "torch.ao"

TIME = {"ResNet-18": 1.15, "MobileNetV2": 1.25}
"""Most time of our step, in times of the float model's."""

MEMORY = 1.4
"""Most memory of our training at its peak, in times of the float model's."""

BATCH, SIZE, CLASSES = 4, 224, 1000
MEMORY_STEPS = 3
FULL = harness.Effort(seconds=30.0, rounds=12, patience=2.0)
QUICK = harness.Effort(seconds=6.0, rounds=4, patience=1.0)

LEGEND = f"""
time: median of one step (forward, backward, SGD with momentum), {BATCH} images of {SIZE} x {SIZE}
ratio: over float in the same round, median over rounds [{harness.CONFIDENCE:.0%} interval]
memory: peak of a process that trains {MEMORY_STEPS} steps, less what it held before it made the model (over float)
ok: the whole interval of ours is at most its limit, and memory at most {MEMORY} of float"""


def in_float(model: nn.Module, x: Tensor) -> nn.Module:
    """The model itself."""
    return model.train()


def octet(model: nn.Module, x: Tensor) -> nn.Module:
    """Ours with its defaults, rounding and observing."""
    return quant.prepare_qat(model.train(), x).train()


def torch_ao(model: nn.Module, x: Tensor) -> nn.Module:
    """torch.ao's FX preparation with its defaults for x86, rounding and observing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated: that is why we are here
        from torch.ao.quantization import get_default_qat_qconfig_mapping
        from torch.ao.quantization.quantize_fx import prepare_qat_fx

        prepared: nn.Module = prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping("x86"), (x,))
    return prepared.train()


MAKERS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {FLOAT: in_float, OURS: octet, AO: torch_ao}


def stepper(model: nn.Module, x: Tensor, classes: Tensor) -> Callable[[], object]:
    """One step of training on the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), classes)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(CLASSES, (BATCH,))


def time_steps(name: str, effort: harness.Effort) -> harness.Race:
    """Everyone's step on one network, in turns."""
    x, classes = batch()
    contenders = [
        harness.Contender(who, stepper(make(networks.NETWORKS[name](), x), x, classes)) for who, make in MAKERS.items()
    ]
    return harness.race(
        name,
        contenders,
        effort=effort,
        shape={"batch": BATCH, "image": SIZE},
        undecided=lambda race: "unsure" in _time_verdict(race),
        clock=harness.clock_for(torch.get_num_threads()),
    )


def peak(name: str, who: str) -> int:
    """Bytes at the peak of a training, in a process of its own: what memory an allocator keeps is its history."""
    command = [sys.executable, str(Path(__file__).resolve()), "--peak", name, who]
    # Its neighbours are found by the script's own folder, which a safe path leaves out.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return int(found.stdout)


def _measure_peak(name: str, who: str) -> int:
    torch.set_num_threads(1)
    x, classes = batch()
    before = resident()
    if before is None:
        raise SystemExit("training_cost: this system does not say how much memory a process holds")
    step = stepper(MAKERS[who](networks.NETWORKS[name](), x), x, classes)
    for _ in range(MEMORY_STEPS):
        step()
    return _high_water() - before


def _high_water() -> int:
    """Most bytes that this process has held. Not ru_maxrss, which a child process inherits from its parent."""
    with open("/proc/self/status") as file:
        [kibibytes] = [int(line.split()[1]) for line in file if line.startswith("VmHWM:")]
    return kibibytes * 1024


@dataclass(frozen=True)
class Cost:
    """Of one network: a race, and bytes at the peak by contender."""

    race: harness.Race
    peaks: dict[str, int]

    @property
    def verdict(self) -> str:
        """ "ok", or what is wrong; unsure: the limit lies within the interval."""
        wrong = [text for text in (_time_verdict(self.race),) if text]
        if self.peaks[OURS] > MEMORY * self.peaks[FLOAT]:
            wrong.append(f"MEMORY above {MEMORY} x float")
        return "; ".join(wrong) or "ok"


def _time_verdict(race: harness.Race) -> str:
    ours, limit = race.ratio(OURS, FLOAT), TIME[race.case]
    if ours.high <= limit:
        return ""
    return f"ABOVE {limit} x float" if ours.low > limit else f"unsure: {limit} x float"


def measure(names: Sequence[str], effort: harness.Effort) -> list[Cost]:
    """Time, then memory, of each network."""
    return [Cost(time_steps(name, effort), {who: peak(name, who) for who in MAKERS}) for name in names]


def table(costs: Sequence[Cost]) -> str:
    """One line a network."""
    rows = []
    for cost in costs:
        times = [display.duration(cost.race.time(who).median) for who in MAKERS]
        ratios = [cost.race.ratio(who, FLOAT) for who in (OURS, AO)]
        shown = [f"{one.median:.2f} [{one.low:.2f}, {one.high:.2f}]" for one in ratios]
        memory = [f"{bytes_ / 2**20:.0f} MiB ({bytes_ / cost.peaks[FLOAT]:.2f})" for bytes_ in cost.peaks.values()]
        limit = f"{TIME[cost.race.case]}"
        rows.append([cost.race.case, *times, shown[0], limit, shown[1], *memory, cost.verdict])
    header = ["training step", *MAKERS, f"{OURS}/{FLOAT}", "limit", f"{AO}/{FLOAT}",
              *(f"memory, {who}" for who in MAKERS), "verdict"]  # fmt: skip
    return display.table(header, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the bytes at the peak of one training, for bench_qat.py")
    parser.add_argument("--peak", nargs=2, required=True, metavar=("NETWORK", "CONTENDER"))
    options = parser.parse_args()
    print(_measure_peak(*options.peak))
