"""Norms over channels, and resizing, between layers: in one planned region, with the numbers of the steps alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.runtime.program_runner import ProgramRunner


class Around(nn.Module):
    """A step between two convolutions, the first of which halves the image."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor] | nn.Module) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 24, 3, 2, 1), nn.Conv2d(24, 5, 3, padding=1)
        self.step: Any = step

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return self.two(self.step(y) if isinstance(self.step, nn.Module) else self.step(y, x))


class ChannelNorm(nn.LayerNorm):
    """Over the channels of an image, which are first."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class Groups(nn.GroupNorm):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


STEPS: dict[str, Callable[[], Any]] = {
    "group norm": lambda: nn.GroupNorm(6, 24),
    "group norm without parameters": lambda: nn.GroupNorm(6, 24, affine=False),
    "a group norm's function": lambda: Groups(4, 24),
    "layer norm over channels": lambda: ChannelNorm(24),
    "instance norm": lambda: nn.InstanceNorm2d(24),
    "instance norm with parameters": lambda: nn.InstanceNorm2d(24, affine=True),
    "group norm and SiLU": lambda: nn.Sequential(nn.GroupNorm(6, 24), nn.SiLU()),
    "group norm and SiLU's function": lambda: lambda y, x: F.silu(F.group_norm(y, 3)),
    "a norm of nobody's parameters": lambda: lambda y, x: F.group_norm(y, 3),
    "upsample": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "upsample with corners": lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "resize to the input's size": lambda: lambda y, x: F.interpolate(y, size=x.shape[2:], mode="bilinear"),
    "nearest to the input's size": lambda: lambda y, x: F.interpolate(y, size=(x.size(2), x.size(3))),
}


def images(size: int = 18) -> Tensor:
    return torch.randn(2, 3, size, size - 4, generator=torch.Generator().manual_seed(size))


def converted(step: Any) -> tuple[nn.Module, nn.Module, ProgramRunner]:
    torch.manual_seed(0)
    model = Around(step).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    q = quant.quantize_static(model, [images()], progress=False)
    [runner] = [module for module in q.modules() if isinstance(module, ProgramRunner)]
    return model, q, runner


@pytest.mark.parametrize("name", STEPS)
def test_one_region(name: str) -> None:
    model, q, runner = converted(STEPS[name]())
    schedule = runner.program.schedule
    assert not schedule.reasons
    assert len(schedule.regions) == 1
    for x in (images(), images(26)):  # another size as well
        with torch.no_grad():
            stepwise = runner.held(x).of(runner.program.values[runner.program.output.index])
            torch.testing.assert_close(q(x), stepwise, rtol=1e-5, atol=1e-5)
            error = (q(x) - model(x)).square().sum() / model(x).square().sum()
        assert error < 5e-3


@pytest.mark.parametrize(
    "step",
    [nn.GroupNorm(6, 24), nn.InstanceNorm2d(24, affine=True), Groups(6, 24), ChannelNorm(24)],
    ids=lambda one: type(one).__name__,
)
def test_parameters_are_read_at_every_call(step: nn.Module) -> None:
    """A write to the norm of the converted model is seen, and so is another parameter in its place."""
    _, q, _ = converted(step)
    norm = q.get_submodule("step")
    with torch.no_grad():
        before = q(images())
        norm.bias.add_(1.0)
        written = q(images())
        norm.bias = nn.Parameter(norm.bias - 1.0)
        assert not torch.allclose(written, before)
        assert torch.equal(q(images()), before)


def test_an_instance_norm_with_running_statistics_runs_as_it_is() -> None:
    model, q, runner = converted(nn.InstanceNorm2d(24, track_running_stats=True))
    assert len(runner.program.schedule.steps) > 1
    with torch.no_grad():
        assert (q(images()) - model(images())).square().sum() / model(images()).square().sum() < 5e-3


def test_a_hooked_norm_runs_as_it_is() -> None:
    _, q, _ = converted(nn.GroupNorm(6, 24))
    calls: list[int] = []
    with torch.no_grad():
        before = q(images())
        q.get_submodule("step").register_forward_hook(lambda *given: calls.append(1))
        torch.testing.assert_close(q(images()), before, rtol=0.1, atol=0.1)
    assert calls == [1]


def test_a_file_keeps_them(tmp_path: Any) -> None:
    for name in ("group norm", "layer norm over channels", "resize to the input's size"):
        model, q, _ = converted(STEPS[name]())
        quant.save(q, tmp_path / "model.q8")
        loaded = quant.load(tmp_path / "model.q8", model=model)
        with torch.no_grad():
            assert torch.equal(loaded(images()), q(images())), name
