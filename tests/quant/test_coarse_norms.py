"""Batch norms that no layer takes in: those that make small channels large stay float, with the sums beside them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from quant.calibrate import CalibrationWarning
from torch import Tensor, nn

from quant.artefact import load, save
from quant.convert import convert
from quant.parity import parity
from quant.prepare import prepare
from quant.report import summary
from quant.static.outlier_check import norm_cosine
from quant.static.simulation import simulating


class FunctionalNorm(nn.BatchNorm2d):
    """Calls the function itself, as timm's does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class Identities(nn.Module):
    """RepVGG's blocks as they are trained: a convolution beside a norm of the same input, summed."""

    def __init__(self, norm: type[nn.BatchNorm2d], blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(blocks))
        self.identities = nn.ModuleList(norm(16) for _ in range(blocks))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for conv, identity in zip(self.convs, self.identities, strict=True):
            x = F.relu(conv(x) + identity(x))
        return self.head(x.mean(dim=(2, 3)))


def model_with(quiet: float, norm: type[nn.BatchNorm2d] = nn.BatchNorm2d) -> nn.Module:
    """Half of the stem's channels are `quiet` times as loud as the others, and the first norm knows it."""
    torch.manual_seed(0)
    model = Identities(norm)
    with torch.no_grad():
        model.stem.weight[8:] *= quiet
        model.stem.bias[8:] *= quiet
        x = F.relu(model.stem(images(9)))
        for conv, identity in zip(model.convs, model.identities, strict=True):
            identity.running_mean.copy_(x.mean(dim=(0, 2, 3)))
            identity.running_var.copy_(x.var(dim=(0, 2, 3)))
            x = F.relu(conv(x) + identity.eval()(x))
    return model.eval()


def images(seed: int) -> Tensor:
    return torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def decibels(expected: Tensor, found: Tensor) -> float:
    return float(10 * torch.log10(expected.square().sum() / (expected - found).square().sum()))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, FunctionalNorm], ids=["module", "function"])
@torch.no_grad()
def test_norms_that_blow_small_channels_up_stay_float(norm: type[nn.BatchNorm2d], tmp_path: Path) -> None:
    model = model_with(0.02, norm)
    prepared = prepare(model, images(1))
    prepared(images(1))
    with pytest.warns(CalibrationWarning, match=r"identities\.0.* stays float: .* makes channels of its input large"):
        converted = convert(prepared)
    [left] = [entry for entry in summary(converted) if "makes channels of its input large" in entry.detail]
    assert left.outcome == "float"
    assert left.name.startswith("identities.0")
    assert all(entry.outcome == "int8" for entry in summary(converted) if "conv" in entry.name or entry.name == "head")
    with simulating(prepared, exact=True):
        assert torch.allclose(prepared(images(2)), converted(images(2)), atol=1e-5)
    assert parity(prepared, converted, [images(2)]).holds
    save(converted, tmp_path / "model.q8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = load(tmp_path / "model.q8", model=model)
    assert torch.equal(restored(images(2)), converted(images(2)))


@torch.no_grad()
def test_what_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with(0.02)
    prepared = prepare(model, images(1))
    prepared(images(1))
    expected = model(images(2))
    with pytest.warns(CalibrationWarning):
        kept = decibels(expected, convert(prepared)(images(2)))
    monkeypatch.setattr("quant.static.outlier_check.norm_cosine", lambda *_: 1.0)
    assert kept > 3 + decibels(expected, convert(prepared)(images(2)))


@torch.no_grad()
def test_norms_of_channels_that_are_alike_are_tables() -> None:
    model = model_with(1.0)
    prepared = prepare(model, images(1))
    prepared(images(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = convert(prepared)
    assert all(summary(converted)[f"identities.{index}"].outcome == "int8" for index in range(3))


@torch.no_grad()
def test_the_cosine_is_the_measured_one() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(0, -3, 32)
    x = torch.randn(20_000, 32, generator=generator) * spread
    norm = nn.BatchNorm1d(32).eval()
    norm.running_var.copy_(spread.square())
    for step, made in ((0.01, 0.03), (0.02, 0.001)):
        rounded = (norm((x / step).round() * step) / made).round() * made
        cosine = float(F.cosine_similarity(norm(x).flatten(), rounded.flatten(), dim=0))
        assert norm_cosine(norm, step, made) == pytest.approx(cosine, abs=0.03)
