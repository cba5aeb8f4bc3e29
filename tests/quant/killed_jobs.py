"""What fuzz_kills.py kills and fills: each job writes files of one folder, and goes on from them when it is run again.

Small models on one thread. A job's result is to the bit the same however often it was stopped before.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import quant
from quant import calibrate
from quant.cli import main as command

Note = Callable[[int], None]
"""Called with the number of batches that are done, or of measurements that are begun."""

BATCHES = 6


class JobFailed(Exception):
    """A command's line on standard error, where its status is not 0."""


class Net(nn.Module):
    """Convolutions, a linear layer behind a residual, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x)).mean((2, 3))
        return self.head(x + self.inner(x))


def net(seed: int = 0) -> nn.Module:
    """The model, in eval mode."""
    torch.manual_seed(seed)
    return Net().eval()


def data() -> list[Tensor]:
    """Batches, of which no two have one range."""
    noise = torch.randn(BATCHES, 4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return list(noise * torch.arange(1, BATCHES + 1).reshape(-1, 1, 1, 1, 1))


def metric(model: nn.Module) -> float:
    """Of the command's searches."""
    with torch.no_grad():
        return float(model(data()[0]).abs().mean())


def converted(seed: int) -> nn.Module:
    return quant.quantize_static(net(seed), data()[:1], progress=False)


def digest(model: nn.Module) -> str:
    """Of a model's state."""
    seen = hashlib.sha256()
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            seen.update(name.encode() + value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


@dataclass(frozen=True)
class Job:
    """One thing that writes files.

    Attributes:
        run: does it in a folder, and returns a digest of the result.
        before: writes what was in the folder before.
        files: that it leaves there.
        checkpoints: those of `files` that change while it runs; each of their contents is whole.
    """

    run: Callable[[Path, Note], str]
    before: Callable[[Path], object]
    files: tuple[str, ...]
    checkpoints: tuple[str, ...] = ()


def noted(batches: Sequence[Any], note: Note) -> Iterator[Any]:
    """When one is asked for, those before it are done."""
    for index, batch in enumerate(batches):
        note(index)
        yield batch
    note(len(batches))


def save(folder: Path, note: Note) -> str:
    quant.save(converted(1), folder / "model.q8", runner=True)
    return digest(quant.load(folder / "model.q8", model=net()))


def export(folder: Path, note: Note) -> str:
    quant.export_onnx(converted(1), folder / "model.onnx", example_inputs=data()[0])
    return ""


def prepared(seed: int = 0) -> nn.Module:
    return quant.prepare(net(seed), data()[0])


def calibrated(seed: int = 0) -> nn.Module:
    model = prepared(seed)
    calibrate.run(model, data(), progress=False)
    return model


def ranges(folder: Path, note: Note) -> str:
    calibrate.save_ranges(calibrated(1), folder / "ranges.json")
    return ""


def collect(folder: Path, note: Note) -> str:
    model = prepared()
    done = calibrate.run(model, noted(data(), note), progress=False, checkpoint=folder / "run.q8c", checkpoint_every=0)
    counts["resumed"] = done.resumed
    return digest(model)


counts: dict[str, int] = {}
"""Of the last run: units that it did not do again, and calls of a metric."""


def learn(method: str) -> Callable[[Path, Note], str]:
    def run(folder: Path, note: Note) -> str:
        model = calibrated()
        options: dict[str, Any] = {"unit": "layer", "steps": 3} if method == "adaround" else {}
        done = quant.learn_rounding(
            model, data(), method, samples=8, checkpoint=folder / "run.q8c", progress=False, **options
        )
        counts["resumed"] = done.resumed
        return digest(quant.convert(model))

    return run


def dynamic(folder: Path, note: Note) -> str:
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    for index, parameter in enumerate(model.parameters()):
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    batches = list(torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(9)))
    done = quant.quantize_dynamic(
        model, batches=batches, rounding="gptq", checkpoint=folder / "run.q8c", progress=False
    )
    return digest(done)


def search(folder: Path, note: Note) -> str:
    counts["calls"] = 0

    def accuracy(model: nn.Module) -> float:
        counts["calls"] += 1
        note(counts["calls"])
        return metric(model)

    ticks = iter(range(1 << 30))
    done = quant.autoquant(
        net(), data()[:2], accuracy, max_drop=0.2, objective="size", checkpoint=folder / "run.json", progress=False,
        clock=lambda: float(next(ticks)),
    )  # fmt: skip
    return digest(done.model) + repr((done.recipe, done.trials))


def words(*options: str) -> list[str]:
    here = "tests.quant.killed_jobs"
    return [*options, "--model", f"{here}:net", "--data", f"{here}:data", "--quiet"]


def run_command(arguments: list[str]) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        status = command(arguments)
    if status:
        raise JobFailed(said.getvalue())


def calibrate_command(folder: Path, note: Note) -> str:
    files = {"--checkpoint": "run.q8c", "--out": "model.q8", "--save-ranges": "ranges.json"}
    named = [word for option, name in files.items() for word in (option, str(folder / name))]
    run_command([*words("calibrate", "--checkpoint-every", "0"), *named])
    return digest(quant.load(folder / "model.q8", model=net()))


def report_command(folder: Path, note: Note) -> str:
    run_command([*words("report"), "--out", str(folder / "report.html")])
    return ""


def tables(folder: Path, note: Note) -> str:
    """What searches and benchmarks write for people."""
    one = replace(quant.sensitivity(net(), data()[:1], metric, progress=False), seconds=0.0)
    one.to_json(folder / "sensitivity.json")
    one.plot(folder / "sensitivity.svg")
    return ""


def old_file(*names: str) -> Callable[[Path], None]:
    """What somebody has there before, which no job can read."""

    def write(folder: Path) -> None:
        for name in names:
            (folder / name).write_text(json.dumps({"before": name}) + "\n" * 100, encoding="utf-8")

    return write


def old_ranges(folder: Path) -> None:
    calibrate.save_ranges(calibrated(0), folder / "ranges.json")


def nothing(folder: Path) -> None:
    """An empty folder."""


JOBS: dict[str, Job] = {
    "save": Job(save, lambda folder: quant.save(converted(0), folder / "model.q8"), ("model.q8",)),
    "export": Job(export, old_file("model.onnx"), ("model.onnx",)),
    "ranges": Job(ranges, old_ranges, ("ranges.json",)),
    "calibrate": Job(collect, nothing, ("run.q8c",), ("run.q8c",)),
    "adaround": Job(learn("adaround"), nothing, ("run.q8c",), ("run.q8c",)),
    "gptq": Job(learn("gptq"), nothing, ("run.q8c",), ("run.q8c",)),
    "dynamic": Job(dynamic, nothing, ("run.q8c",), ("run.q8c",)),
    "autoquant": Job(search, nothing, ("run.json",), ("run.json",)),
    "command": Job(
        calibrate_command, old_file("model.q8", "ranges.json"), ("run.q8c", "model.q8", "ranges.json"), ("run.q8c",)
    ),
    "report": Job(report_command, old_file("report.html"), ("report.html",)),
    "tables": Job(tables, old_file("sensitivity.json", "sensitivity.svg"), ("sensitivity.json", "sensitivity.svg")),
}


class Wide(nn.Module):
    """Layers of every kind of native code, large enough for two threads: Winograd, depthwise, products, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 64, 3, padding=1)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.point = nn.Conv2d(64, 128, 1)
        self.norm = nn.LayerNorm(128)
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.head = nn.Linear(128, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.point(torch.relu(self.depthwise(torch.relu(self.first(x))))))
        x = self.norm(x.flatten(2).transpose(1, 2))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return torch.softmax(self.head(x), -1)


class Recurrent(nn.Module):
    """An embedding, recurrent layers and a linear layer, as text has them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 128)
        self.lstm = nn.LSTM(128, 128, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(256, 64, batch_first=True)
        self.head = nn.Linear(64, 500)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(self.table(x))[0])[0])


@functools.cache
def made(kind: str) -> tuple[nn.Module, Any]:
    """A network, and its input."""
    torch.manual_seed(3)
    if kind == "wide":
        return Wide().eval(), torch.randn(4, 16, 16, 16)
    if kind == "large":
        layers = [nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)]
        return nn.Sequential(*layers).eval(), torch.randn(256, 1024)
    return Recurrent().eval(), torch.randint(500, (8, 32))


def outputs(model: nn.Module, x: Any) -> str:
    with torch.no_grad():
        return hashlib.sha256(model(x).contiguous().numpy().tobytes()).hexdigest()


def quantize(kind: str) -> Callable[[Path], str]:
    def run(folder: Path) -> str:
        _, x = made(kind)
        return outputs(quantized(kind), x)

    return run


def quantized(kind: str) -> nn.Module:
    model, x = made(kind)
    return quant.quantize_dynamic(model) if kind == "recurrent" else quant.quantize_static(model, [x], progress=False)


def load(kind: str) -> Callable[[Path], str]:
    """Its weights are packed and its plans built anew."""

    def run(folder: Path) -> str:
        model, x = made(kind)
        return outputs(quant.load(folder / f"{kind}.q8", model=model), x)

    return run


def other_sizes(kind: str) -> Callable[[Path], str]:
    """Of a model that has run: plans for sizes that it has not seen."""

    def run(folder: Path) -> str:
        _, x = made(kind)
        return outputs(loaded(folder, kind), x[:3]) + outputs(loaded(folder, kind), x[:1])

    return run


@functools.cache
def loaded(folder: Path, kind: str) -> nn.Module:
    model, _ = made(kind)
    return quant.load(folder / f"{kind}.q8", model=model)


KINDS = ("wide", "recurrent", "large")
TASKS: dict[str, Callable[[Path], str]] = {
    f"{name} {kind}": task(kind)
    for name, task in (("quantize", quantize), ("load", load), ("other sizes", other_sizes))
    for kind in KINDS
}
"""What computes: it takes the folder of `write_models`, and returns a digest of outputs."""


def write_models(folder: Path) -> None:
    """The files of TASKS."""
    for kind in KINDS:
        write_model(folder, kind)


def write_model(folder: Path, kind: str) -> None:
    """The file of a network for octet-run, and its input."""
    example = made(kind)[1] if kind == "recurrent" else None
    quant.save(quantized(kind), folder / f"{kind}.q8", runner=True, example_inputs=example)
    numpy.save(folder / f"{kind}.npy", made(kind)[1].numpy())
