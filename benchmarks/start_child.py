"""One side of `bench_start.py`: what a process does with the package of one checkout before its model just runs.

It is started with the import path of that checkout. As that may be an old one, it calls `prepare`, `calibrate.run`,
`convert`, `save` and `load`, and asks nothing else of the package, whose import it measures as well.

    python start_child.py serve FOLDER              # answers requests, a line each: the name of a case
    python start_child.py load CASE FOLDER          # a fresh process: import, load, first call
    python start_child.py quantize CASE FOLDER      # a fresh process: import, quantize_static, first call

Seconds of the process's CPU time come back, a line of JSON for each answer.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

sys.path.append(str(Path(__file__).resolve().parent))  # a safe path leaves the script's own folder out

import networks
import torch
from torch import Tensor, nn

STEADY = 200
"""Calls at the same shape, of which the mean is taken."""
NEW_SIZES = (9, 3, 5, 4, 6, 7, 8)
"""Batch sizes, or lengths less 8, after the captured one, which is 2."""


class LastState(nn.Module):
    """An LSTM, and a linear layer on what it gives at the last time step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(64, 64, batch_first=True), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.lstm(x)[0][:, -1])


def small_cnn() -> nn.Module:
    """Two convolutions and a linear layer."""
    first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(*first, nn.Conv2d(16, 32, 3), nn.ReLU(), *last)


def encoder() -> nn.Module:
    """Three layers of torch's own encoder, 128 wide."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


Case: TypeAlias = tuple[Callable[[], nn.Module], Callable[[int], tuple[int, ...]]]

CASES: dict[str, Case] = {
    "small CNN": (small_cnn, lambda size: (size, 3, 16, 16)),
    "encoder, 3 layers": (encoder, lambda size: (2, size + 8, 128)),
    "LSTM": (LastState, lambda size: (2, size + 8, 64)),
    "ResNet-18": (networks.ResNet18, lambda size: (size, 3, 32, 32)),
}
"""Small inputs: what is measured does not depend on sizes, and what a run computes does."""


class Clock:
    """Seconds of this process, by row of the table."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def row(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        start = time.process_time()
        yield
        self.seconds[name] = time.process_time() - start


def import_package(clock: Clock, folder: Path) -> Any:
    """The package of this side, for the first time in this process; torch is there already."""
    with clock.row("import quant"):
        import quant
    if not Path(str(quant.__file__)).is_relative_to(folder):
        raise SystemExit(f"quant was imported from {quant.__file__}, not from the checkout that is linked in {folder}")
    return quant


def made(case: str) -> tuple[nn.Module, list[Tensor]]:
    """The float model in eval mode, and inputs of the captured size and of the new ones."""
    make, shape_of = CASES[case]
    torch.manual_seed(0)
    model = make().eval()
    return model, [torch.randn(shape_of(size)) for size in (2, *NEW_SIZES)]


def quantized(quant: Any, model: nn.Module, x: Tensor, clock: Clock) -> nn.Module:
    """What `quantize_static` does, in its three phases."""
    with clock.row("prepare"):
        prepared = quant.prepare(model, x)
    with clock.row("calibrate"):
        quant.calibrate.run(prepared, [x], progress=False)
    with clock.row("convert"):
        q: nn.Module = quant.convert(prepared)
    clock.seconds["quantize_static"] = sum(clock.seconds[name] for name in ("prepare", "calibrate", "convert"))
    return q


def path_of(case: str, folder: Path) -> Path:
    """The file of a case, which this side saved."""
    return folder / f"{case.replace(' ', '_')}.q8"


def lap(quant: Any, case: str, folder: Path) -> dict[str, float]:
    """Everything that one process can measure again and again, once."""
    model, (x, *others) = made(case)
    clock = Clock()
    q = quantized(quant, model, x, clock)
    with clock.row("first call"):
        q(x)
    with clock.row("steady call"):
        for _ in range(STEADY):
            q(x)
    clock.seconds["steady call"] /= STEADY
    news = []
    for other in others:
        with clock.row("new shape"):
            q(other)
        news.append(clock.seconds["new shape"])
    clock.seconds["new shape"] = statistics.median(news)
    path = path_of(case, folder)
    if not path.exists():
        quant.save(q, path)
        return lap(quant, case, folder)
    with clock.row("load"):
        loaded = quant.load(path, model=model)
    with clock.row("first call after load"):
        loaded(x)
    return clock.seconds


def serve(folder: Path) -> None:
    """A lap for each line of input."""
    quant = import_package(Clock(), folder)
    for line in sys.stdin:
        gc.collect()
        gc.disable()
        print(json.dumps(lap(quant, line.strip(), folder)), flush=True)
        gc.enable()


def fresh(what: str, case: str, folder: Path) -> dict[str, float]:
    """What a process needs from the import to the first output."""
    model, (x, *_) = made(case)
    clock = Clock()
    quant = import_package(clock, folder)
    if what == "load":
        with clock.row("all"):
            quant.load(path_of(case, folder), model=model)(x)
    else:
        with clock.row("all"):
            quant.quantize_static(model, [x], progress=False)(x)
    return {"import quant": clock.seconds["import quant"], f"import, {what}, call": sum(clock.seconds.values())}


def main() -> None:
    """Arguments: see above."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    what, *case, folder = sys.argv[1:]
    with torch.inference_mode():
        if what == "serve":
            serve(Path(folder))
        else:
            print(json.dumps(fresh(what, *case, Path(folder))))


if __name__ == "__main__":
    main()
