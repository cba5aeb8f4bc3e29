"""Batch norms that call F.batch_norm themselves, trained for int8: in the graph, and as the float model trains them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant import prepare_qat
from quant.capture import capture
from quant.convert import convert
from quant.report import summary

from .test_convert import seeded

IMAGES = torch.randn(6, 3, 10, 10, generator=torch.Generator().manual_seed(3))


class NormAct(nn.BatchNorm2d):
    """As timm writes it: torch.nn's own forward with an activation behind it."""

    step = 1

    def __init__(self, channels: int, momentum: float | None = 0.6) -> None:
        super().__init__(channels, momentum=momentum)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        share = 0.0 if self.momentum is None else self.momentum
        tracks = not self.training or self.track_running_stats
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(self.step)
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        mean, variance = (self.running_mean, self.running_var) if tracks else (None, None)
        y = F.batch_norm(x, mean, variance, self.weight, self.bias, self.training, self.share(share), self.eps)
        return self.act(self.drop(y))

    def share(self, share: float) -> float:
        return share


class OtherShare(NormAct):
    """Its momentum in training is not the one that it says."""

    def share(self, share: float) -> float:
        return 2 * share if self.training else share


class OtherCount(NormAct):
    """It counts in steps of two."""

    step = 2


class TwoCounts(NormAct):
    """It counts each batch twice."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        return super().forward(x)


class ByCount(NormAct):
    """It goes on by the count of batches."""

    def share(self, share: float) -> float:
        return share if not self.training or float(self.num_batches_tracked) < 1e6 else 0.01


class ReadCount(NormAct):
    """Its result follows from the count of batches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.num_batches_tracked + 1)


class KeptUntracked(NormAct):
    """It says that it tracks nothing, and does."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.track_running_stats = False

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.6, self.eps)
        return self.act(y)


class MadeWeight(nn.Module):
    """Its weight is made in the call, from what is trained."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, self.scale * 2, None, self.training, 0.3, 1e-5)


class Sided(nn.Module):
    """Does something else in training mode, after a norm that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = NormAct(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y * 2 if self.training else y


def model_with(norm: nn.Module) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm, nn.Conv2d(8, 4, 3)))


def islands(model: nn.Module) -> list[str]:
    return list(capture(model.eval(), IMAGES, training=True).islands)


def trained(model: nn.Module, steps: int = 5) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(IMAGES).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("momentum", [0.6, None], ids=["moving", "cumulative"])
def test_a_norm_that_counts_its_batches_is_no_island(momentum: float | None) -> None:
    assert islands(model_with(NormAct(8, momentum))) == []


@pytest.mark.parametrize("momentum", [0.6, None], ids=["moving", "cumulative"])
@pytest.mark.parametrize("tracks", [True, False], ids=["tracked", "untracked"])
def test_a_norm_trains_as_in_float(momentum: float | None, tracks: bool) -> None:
    model = model_with(NormAct(8, momentum))
    model[1].track_running_stats = tracks
    twin = trained(copy.deepcopy(model))
    assert islands(model) == []
    p = trained(prepare_qat(model, IMAGES))
    for name in ("running_mean", "running_var"):
        mine, theirs = getattr(p[1], name), getattr(twin[1], name)
        assert torch.equal(theirs, getattr(model[1], name)) is not tracks
        assert torch.allclose(mine, theirs, rtol=0.05, atol=0.01), name
    assert int(p[1].num_batches_tracked) == int(twin[1].num_batches_tracked) == 5 * tracks
    q = convert(p.eval())
    assert summary(q)["1"].detail == "folded into 0"
    with torch.no_grad():
        assert torch.allclose(q(IMAGES), p(IMAGES), atol=0.05)


def test_a_norm_that_is_called_twice_counts_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), NormAct(8, None)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(self.conv(x)) + 1)

    model = seeded(Twice)
    twin = trained(copy.deepcopy(model))
    assert islands(model) == []
    p = trained(prepare_qat(model, IMAGES))
    assert int(p.norm.num_batches_tracked) == int(twin.norm.num_batches_tracked) == 10
    assert torch.allclose(p.norm.running_mean, twin.norm.running_mean, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("kind", [OtherShare, OtherCount, TwoCounts, ByCount, ReadCount, KeptUntracked, MadeWeight])
def test_a_norm_that_trains_otherwise_than_it_says_runs_as_it_is(kind: type[nn.Module]) -> None:
    assert islands(model_with(kind(8))) == ["1"]


def test_what_differs_beside_a_norm_is_the_island() -> None:
    assert islands(model_with(Sided())) == ["1"]


def test_a_norm_that_stays_in_eval_mode_keeps_its_statistics() -> None:
    """Beside one that follows the mode, and counts."""

    class Frozen(NormAct):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

        def forward(self, x: Tensor) -> Tensor:
            y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.3, self.eps)
            return self.act(self.drop(y))

    model = model_with(nn.Sequential(NormAct(8), Frozen(8)))
    assert islands(model) == []
    p = trained(prepare_qat(model, IMAGES))
    p[1][1].training = True
    p(IMAGES)
    assert torch.equal(p[1][1].running_mean, model[1][1].running_mean)
    assert not torch.equal(p[1][0].running_mean, model[1][0].running_mean)


def test_a_frozen_norm_beside_one_by_the_batch_stays_frozen() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("variance", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            y = F.batch_norm(x, None, None, training=True)
            return F.batch_norm(y, self.mean, self.variance, None, None, False)

    model = model_with(Both())
    assert islands(model) == []
    p = trained(prepare_qat(model, IMAGES + 1))
    assert torch.equal(p[1].mean, model[1].mean)
    assert torch.equal(p[1].variance, model[1].variance)
