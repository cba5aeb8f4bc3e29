"""Transposed convolutions in native calls: the phases of an ordinary one, put in order by moves of the plan."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from quant.kernels import use
from quant.kernels.backends.compiled import CompiledBackend
from torch import nn

import quant
from quant.runtime.programs import RESERVED
from quant.static.native import Schedule

UP: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1-D": (nn.ConvTranspose1d(4, 6, 8, stride=4, padding=2), (9,)),
    "2-D": (nn.ConvTranspose2d(4, 6, 2, stride=2), (5, 7)),
    "cut": (nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1, bias=False), (5, 7)),
    "stride 1": (nn.ConvTranspose2d(4, 6, 3, padding=1), (5, 7)),
    "more at the end": (nn.ConvTranspose2d(4, 6, 3, stride=(3, 2), padding=1, output_padding=(1, 0)), (5, 4)),
    "gaps": (nn.ConvTranspose2d(4, 6, 2, stride=3, output_padding=2), (3, 4)),
    "groups": (nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1, groups=2), (5, 6)),
    "depthwise": (nn.ConvTranspose2d(4, 4, 3, stride=2, groups=4), (5, 6)),
    "3-D": (nn.ConvTranspose3d(4, 6, 3, stride=(1, 2, 2), padding=(0, 1, 1)), (2, 4, 3)),
}


@pytest.mark.parametrize(("up", "sizes"), UP.values(), ids=list(UP))
@pytest.mark.parametrize("after", ["nothing", "a clamp", "a layer"])
def test_it_is_planned_with_the_bits_of_its_steps(up: Any, sizes: tuple[int, ...], after: str) -> None:
    torch.manual_seed(0)
    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(sizes)]
    last = {"nothing": [], "a clamp": [nn.ReLU()], "a layer": [convolution(up.out_channels, 3, 1)]}
    model = nn.Sequential(convolution(4, 4, 1), up, *last[after]).eval()
    x = torch.randn(2, 4, *sizes)
    q = quant.quantize_static(model, [x, torch.randn(2, 4, *sizes)], progress=False)
    runner: Any = q._modules[RESERVED]
    planned: Schedule = runner.program.schedule
    assert len(planned.steps) == len(planned.regions) == 1
    with torch.no_grad():
        for one in (x, torch.randn(1, 4, *(size + 2 for size in sizes))):
            got = q(one)
            with mock.patch.object(CompiledBackend, "plans", False):
                assert torch.equal(q(one), got)
            with use("reference"):
                assert (q(one) - got).abs().max() <= 0.01 * got.abs().max()
            assert got.shape == model(one).shape
        assert (q(x) - model(x)).norm() < 0.05 * model(x).norm()
