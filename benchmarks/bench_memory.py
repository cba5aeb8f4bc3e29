"""Memory of converting and of running a model, over the float model's (`make bench-memory`).

Each step has a process of its own, because what a process once held stays in its figures: the float model built and
called, the same model quantised, and its file loaded and called. Read from Linux: the resident bytes at the peak of a
step and after it, less those of the process before it, when torch and the package were imported and had computed
something small. A step of int8 builds the float model as well, as `quant.load` needs it.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import display
import harness
import networks
import torch
from torch import Tensor, nn

import quant

CALLS = 3
"""Calls of a model: the first packs and plans, and the others find what it left."""

MIB = 1 << 20


class Tagger(nn.Module):
    """Two layers of an LSTM, 512 wide, and a linear layer on each step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(512, 512, 2, batch_first=True), nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def statically(model: nn.Module, x: Tensor) -> nn.Module:
    """Calibrated on two batches."""
    return quant.quantize_static(model, [x, x.flip(-1)], progress=False)


def dynamically(model: nn.Module, x: Tensor) -> nn.Module:
    """Its weights alone; nothing is run."""
    return quant.quantize_dynamic(model)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[nn.Module, Tensor], nn.Module]]] = {
    "ResNet-18, static": (networks.ResNet18, (1, 3, 224, 224), statically),
    "LSTM, dynamic": (Tagger, (1, 32, 512), dynamically),
}
"""The network, its input's shape, and how it is quantised."""

STEPS = {
    "float": "float: build and call",
    "quantize": "int8: build, prepare, calibrate, convert",
    "run": "int8: build, load and call",
}


def status(field: str) -> int:
    """Bytes of a field of this process's memory, as Linux counts them: VmRSS now, VmHWM at the peak."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"this system does not say {field} in /proc/self/status: expected Linux")
    return int(found[1]) * 1024


def measure(case: str, step: str, file: Path) -> dict[str, int]:
    """Bytes at the peak of a step and after it, above those before it, and of packed weights; in a fresh process."""
    make, shape, quantized = CASES[case]
    with torch.no_grad():
        nn.Linear(8, 8)(torch.randn(2, 8))
        gc.collect()
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
        torch.manual_seed(0)
        model, x = make().eval(), torch.randn(shape)
        if step == "quantize":
            model = quantized(model, x)
        elif step == "run":
            model = quant.load(file, model=model)
        for _ in range(0 if step == "quantize" else CALLS):
            model(x)
        gc.collect()
        found = {"peak": status("VmHWM") - before, "after": status("VmRSS") - before}
    if step == "quantize":
        quant.save(model, file)
    return {**found, "packed": quant.summary(model).bytes_packed}


def fresh(case: str, step: str, file: Path) -> dict[str, int]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--step", case, step, str(file)]
    found: dict[str, int] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def table(case: str, found: dict[str, dict[str, int]]) -> str:
    """A row for each step; its peak also over the float model's."""
    rows = []
    for step, name in STEPS.items():
        cells = [f"{found[step][what] / MIB:.1f}" for what in ("peak", "after", "packed")]
        rows.append([name, *cells, f"{found[step]['peak'] / found['float']['peak']:.2f}"])
    return display.table([case, "MiB at peak", "after", "packed weights", "peak / float's"], rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", default="", help="only the cases whose name it finds")
    parser.add_argument("--step", nargs=3, metavar=("CASE", "STEP", "FILE"), help="one step in this process, as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep."""
    options = parse(arguments)
    torch.set_num_threads(1)
    if options.step is not None:
        case, step, file = options.step
        print(json.dumps(measure(case, step, Path(file))))
        return 0
    chosen = [name for name in CASES if re.search(options.only, name)]
    if not chosen:
        raise SystemExit(f"--only {options.only}: no case is called so; there are {', '.join(CASES)}")
    facts, results = harness.machine((), 1), {}
    print(harness.describe(facts) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            file = Path(folder) / "model.q8"
            results[case] = {step: fresh(case, step, file) for step in STEPS}
            print(table(case, results[case]) + "\n")
    path = harness.save("bench-memory", {"machine": facts, "cases": results})
    print(f"raw numbers: {path.relative_to(harness.RESULTS.parents[1])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
