"""What capture makes of forwards that do something else in training mode, or set the mode themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.capture import capture
from quant.capture.recorder import Recorder


def islands(model: nn.Module, inputs: Tensor) -> list[str]:
    return list(capture(model.eval(), inputs, training=True).islands)


class Unread(nn.Module):
    """Computes something in training mode that nobody reads, before what depends on the mode in the usual way."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.fc.weight.float()
            x.mean()
        return F.dropout(self.fc(x), 0.5, self.training)


def test_what_nobody_reads_may_be_computed_in_training_alone() -> None:
    """So do Mamba's layers, for a kernel that is not there."""
    model, x = nn.Sequential(Unread(), nn.ReLU()), torch.randn(4, 16)
    assert islands(model, x) == []
    prepared = quant.prepare_qat(model, x)
    prepared.train()
    assert (
        float((prepared(torch.randn(64, 16)) == 0).float().mean()) > 0.6
    )  # of those that are positive half are dropped
    assert not torch.equal(prepared(x), prepared(x))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return self.fc(x if scale is None else x * scale)


class Decides(nn.Module):
    """Calls its part with something else in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.factor = Scaled(), nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x, None if self.training else self.factor)


def test_who_calls_a_module_otherwise_in_training_is_the_island_and_not_the_module() -> None:
    assert islands(nn.Sequential(nn.Linear(16, 16), Decides()), torch.randn(4, 16)) == ["1"]


class SetsModes(nn.Module):
    """Never drops anything, whatever mode it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(16, 16), nn.Sequential(nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.drop.eval()
        return self.drop(self.fc(x))


def test_a_forward_that_sets_the_mode_of_its_parts_runs_for_it() -> None:
    model, x = nn.Sequential(SetsModes(), nn.ReLU(), nn.Linear(16, 16)), torch.randn(64, 16)
    found = capture(model, x, training=True)
    assert found.islands == {"0": "its forward sets the training mode of 0.drop"}
    prepared = quant.prepare_qat(model, x)
    prepared.train()
    torch.testing.assert_close(prepared(x), prepared(x))  # ranges are averaged with themselves, and rounded


class Drops(nn.Module):
    """Leaves a sample of its branch out in training, as stochastic depth does, which is no dropout of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if self.training:
            y = y * torch.empty(len(y), 1).bernoulli_(0.9)
        return x + y


def recordings_of(blocks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the model is recorded; the layers of its islands are so besides."""
    paths: list[str] = []
    run = Recorder.run

    def counted(recorder: Recorder, *call: Any) -> None:
        paths.append(recorder.path)
        run(recorder, *call)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "run", counted)
        model = nn.Sequential(*(Drops() for _ in range(blocks)))
        assert islands(model, torch.randn(4, 8)) == [str(place) for place in range(blocks)]
    return paths.count("")


def test_one_proof_serves_all_islands_that_training_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is recorded once in either mode. A torchvision model of 30 took 382 recordings before, and takes 94."""
    torch.manual_seed(0)
    assert recordings_of(6, monkeypatch) - recordings_of(2, monkeypatch) == 4 * 2
