"""One search on a small model, in a process of its own that may be killed: test_autoquant.py starts it.

python autoquant_run.py CHECKPOINT, the clock's READING at which the process kills itself, THREADS
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
from torch import Tensor, nn

import quant

DROP = 0.03
COARSE = quant.Recipe({"layers.0": quant.QConfig(weight_bits=2)})


class Classifier(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.layers(x)))


def problem() -> tuple[nn.Module, list[Tensor], Tensor, Tensor]:
    """The model, calibration data, and inputs with the classes that the model gives them."""
    torch.manual_seed(0)
    model = Classifier().eval()
    batches = [torch.randn(16, 16) for _ in range(4)]
    x = torch.randn(400, 16)
    with torch.no_grad():
        classes = model(x).argmax(1)
    return model, batches, x, classes


def search(checkpoint: str | None, **settings: object) -> quant.types.Autoquantized:
    """The smallest model that loses at most DROP of the agreement, the first layer's weights having 2 bits."""
    model, batches, x, classes = problem()
    return quant.autoquant(
        model,
        batches,
        lambda one: float((one(x).argmax(1) == classes).double().mean()),
        checkpoint=checkpoint,
        progress=False,
        **{"recipe": COARSE, "max_drop": DROP, "objective": "size", "clock": Ticks(), **settings},  # type: ignore[arg-type]
    )


class Ticks:
    """A clock on which every call takes a second; the process is killed at the last of its readings, if any."""

    def __init__(self, last: int | None = None) -> None:
        self.now, self.last = 0.0, last

    def __call__(self) -> float:
        self.now += 1.0
        if self.now == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.now


def digest(result: quant.types.Autoquantized) -> str:
    """Of the model's bytes, its recipe and every trial."""
    seen = hashlib.sha256(repr((result.recipe, result.trials, dict(result.reasons), result.evaluations)).encode())
    for name, tensor in sorted(result.model.state_dict().items()):
        seen.update(name.encode() + (tensor.numpy().tobytes() if isinstance(tensor, Tensor) else b""))
    return seen.hexdigest()


def main(checkpoint: str, last: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    search(checkpoint, clock=Ticks(int(last)))


if __name__ == "__main__":
    main(*sys.argv[1:])
