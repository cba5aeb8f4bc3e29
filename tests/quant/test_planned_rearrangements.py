"""Views that plans make up of several operations: in integers and in float, with the bits of their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from quant.kernels import use
from quant.kernels.backends.compiled import CompiledBackend
from torch import Tensor, nn

import quant
from quant.runtime.programs import RESERVED
from quant.static.native import Schedule

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rolled": lambda x: torch.roll(x, 3, 1),
    "rolled back in two dimensions": lambda x: x.roll((-2, 1), (2, -1)),
    "rolled further than it is long": lambda x: torch.roll(x, 11, -1),
    "pixels of channels": lambda x: F.pixel_shuffle(x, 2),
    "channels of pixels": lambda x: F.pixel_unshuffle(x, 2),
    "channels in turns": lambda x: torch.channel_shuffle(x, 4),
    "a new dimension": lambda x: x[:, None, :, 1:][:, 0],
    "a new last dimension": lambda x: x[..., None].squeeze(-1),
    "the last ones": lambda x: x[..., 2:],
    "between dots": lambda x: x[:, ..., ::2],
    "an index after dots": lambda x: x[..., None, :, 1].transpose(2, 3),
    "padded by itself": lambda x: F.pad(x, (1, 2, 3, 0), mode="reflect"),
    "padded by its edge": lambda x: F.pad(x, (2, 0, 1, 1), mode="replicate"),
    "padded in circles": lambda x: F.pad(x, (1, 1, 0, 2), mode="circular"),
    "stacked": lambda x: torch.stack([x, x + x], 2).flatten(1, 2),
    "stacked last": lambda x: torch.stack((x, x), -1).flatten(3),
}


class Between(nn.Module):
    """A view of an image between convolutions, and one of it between layer norms."""

    def __init__(self, view: Callable[[Tensor], Tensor], *, reals: bool) -> None:
        super().__init__()
        shape = view(torch.zeros(1, 8, 6, 8)).shape
        self.view, self.first = view, nn.Conv2d(3, 8, 1)
        self.before = nn.LayerNorm(8) if reals else nn.Identity()
        self.after = nn.LayerNorm(shape[-1]) if reals else nn.Identity()
        self.last = nn.Conv2d(shape[1], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.after(self.view(self.before(self.first(x)))))


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
@pytest.mark.parametrize("reals", [False, True], ids=["integers", "reals"])
def test_one_native_call_with_the_bits_of_its_steps(view: Callable[[Tensor], Tensor], reals: bool) -> None:
    torch.manual_seed(0)
    model, x = Between(view, reals=reals).eval(), torch.randn(2, 3, 6, 8)
    q = quant.quantize_static(model, [x], progress=False)
    runner: Any = q._modules[RESERVED]
    planned: Schedule = runner.program.schedule
    assert len(planned.steps) == len(planned.regions) == 1, planned.describe()
    with torch.no_grad():
        for one in (x, torch.randn(1, 3, 10, 8)):
            got = q(one)
            with mock.patch.object(CompiledBackend, "plans", False):
                assert torch.equal(q(one), got)
            with use("reference"):
                assert (q(one) - got).norm() < 0.02 * got.norm()
        assert (q(x) - model(x)).norm() < 0.06 * model(x).norm()


def test_a_roll_of_what_is_shorter_than_the_shift() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 8, 1), Rolled(), nn.Conv1d(8, 2, 1)).eval()
    q = quant.quantize_static(model, [torch.randn(2, 3, 9), torch.randn(2, 3, 7)], progress=False)
    for length in (1, 2, 5):
        x = torch.randn(1, 3, length)
        with torch.no_grad():
            got = q(x)
            with mock.patch.object(CompiledBackend, "plans", False):
                assert torch.equal(q(x), got)


class Rolled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll(4, -1)
