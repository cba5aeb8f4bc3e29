"""What a user does first, with the package that is installed here: `.ci/test_wheels.py` runs it in each environment.

Prints JSON: the versions, and a digest of the int8 outputs of each step, which is the same wherever torch's own float
arithmetic is. Anything wrong is an AssertionError.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import quant
from quant.runtime.uncaptured import UncapturedCall


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(24, 32, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)[0])


class Net(nn.Module):
    """A convolutional network with a loop and a branch on its index."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = torch.relu(x + block(x)) if index % 2 else torch.relu(block(x))
        return self.head(self.pool(x))

    def pool(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class Strided(Net):
    """One that counts to a size, which shows in nothing but the code of its forward and the lines that run."""

    def pool(self, x: Tensor) -> Tensor:
        last = 0
        for row in range(0, x.shape[2], 4):
            last = row
        return x[:, :, last:].mean((2, 3))


def main() -> None:
    """Run each step, and print what came of it."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    assert Path(sys.prefix) in Path(quant.__file__).parents, f"{quant.__file__} is not the installed package"
    said = {"python": platform.python_version(), "torch": torch.__version__, "octet-quant": quant.__version__}
    said["doctor"] = doctor()
    assert not quant.kernels.available()["native"], quant.kernels.available()["native"]
    for step in (dynamic_lstm, static_cnn, counted_size, qat_steps):
        torch.manual_seed(0)
        said[step.__name__] = digest(step())
    print(json.dumps(said))


def doctor() -> str:
    """The line of `quant doctor` on the compiled kernels."""
    done = subprocess.run(
        [sys.executable, "-m", "quant", "doctor"], stdout=subprocess.PIPE, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"quant doctor exits {done.returncode}:\n{done.stdout}"
    return next(line for line in done.stdout.splitlines() if line.lstrip().startswith("native"))


def dynamic_lstm() -> Tensor:
    """An LSTM in one call, saved and loaded."""
    model, x = Tagger().eval(), torch.randn(3, 7, 24)
    return saved_and_loaded(model, quant.quantize_dynamic(model), Tagger(), x, 0.05)


def static_cnn() -> Tensor:
    """A CNN with calibration data, saved and loaded, at two sizes of input."""
    model, batches = Net().eval(), [torch.rand(4, 3, 33, 33) for _ in range(4)]
    q = quant.quantize_static(model, batches, progress=False)
    small = saved_and_loaded(model, q, Net(), batches[0], 0.1)
    return torch.cat([small, saved_and_loaded(model, q, Net(), torch.rand(2, 3, 49, 41), 0.1)])


def counted_size() -> Tensor:
    """A CNN that counts to a size, at other sizes: int8 near float, or a warning and float between int8 layers."""
    model, batches = Strided().eval(), [torch.rand(4, 3, 33, 33) for _ in range(4)]
    q = quant.quantize_static(model, batches, progress=False)
    outputs = [q(batches[0])]
    for size in (29, 31, 35, 37, 41, 49, 65):
        x = torch.rand(2, 3, size, 33)
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore", UncapturedCall)
            y, expected = q(x), model(x)
        error = float((y - expected).norm() / expected.norm())
        assert error < 0.1, f"relative error {error:.3f} at height {size}, expected less than 0.1"
        outputs.append(y)
    return torch.cat(outputs)


def qat_steps() -> Tensor:
    """Some steps of training for int8."""
    x, y = torch.rand(8, 3, 17, 17), torch.randint(10, (8,))
    p = quant.prepare_qat(Net(), x)
    optimizer = torch.optim.SGD(p.parameters(), lr=0.05)
    p.train()
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(p(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    p.eval()
    q = quant.convert(p)
    with torch.inference_mode():
        torch.testing.assert_close(q(x), p(x), rtol=0.1, atol=0.1)
        return q(x)


def saved_and_loaded(model: nn.Module, q: nn.Module, fresh: nn.Module, x: Tensor, bound: float) -> Tensor:
    """The output of an int8 model, which is near to float's and the same after a file."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        file = Path(folder, "model.safetensors")
        quant.save(q, file)
        y, expected = q(x), model(x)
        assert torch.equal(quant.load(file, model=fresh)(x), y), "what is loaded computes something else"
        error = float((y - expected).norm() / expected.norm())
        assert error < bound, f"relative error {error:.3f}, expected less than {bound}"
        with quant.kernels.use("reference"):
            torch.testing.assert_close(quant.load(file, model=fresh)(x), y, rtol=1e-4, atol=1e-4)
    return y


def digest(y: Tensor) -> str:
    """A name for the exact values of an output."""
    return hashlib.sha256(y.contiguous().numpy().tobytes()).hexdigest()[:12]


if __name__ == "__main__":
    main()
