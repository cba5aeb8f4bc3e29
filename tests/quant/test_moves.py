"""Calls that move values, however their settings are given: planned between integers and between reals, as by steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.runtime.instructions import Guard
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.region import Region

Move = Callable[[Tensor], Tensor]


class ByName(nn.Module):
    """A dropout whose input is named."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(input=x)  # type: ignore[no-any-return]


VIEWS: dict[str, Move] = {
    "view": lambda x: x.view(-1, 6, 4),
    "view of a list": lambda x: x.view([-1, 6, 4]),
    "view by name": lambda x: x.view(size=(-1, 6, 4)),
    "view of sizes": lambda x: x.view(x.size(0), x.shape[1], 16),
    "reshape": lambda x: torch.reshape(x, (-1, 2, 3, 16)),
    "reshape by name": lambda x: torch.reshape(input=x, shape=(-1, 6, 16)),
    "flatten": lambda x: x.flatten(1),
    "flatten by name": lambda x: torch.flatten(x, start_dim=1, end_dim=2),
    "flatten a layer": nn.Flatten(1, 2),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "unflatten by name": lambda x: x.unflatten(dim=-3, sizes=(3, 2)),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "permute by name": lambda x: torch.permute(x, dims=(0, 3, 2, 1)),
    "transpose": lambda x: x.transpose(1, -1),
    "transpose by name": lambda x: x.transpose(dim0=1, dim1=2),
    "swapaxes": lambda x: torch.swapaxes(x, 1, 2),
    "swapaxes by name": lambda x: x.swapaxes(axis0=1, axis1=3),
    "unsqueeze": lambda x: x.unsqueeze(2),
    "unsqueeze by name": lambda x: torch.unsqueeze(x, dim=-2),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(dim=1),
    "an item": lambda x: x[:, 1],
    "items": lambda x: x[:, 1:, ::2, 3],
    "a chunk": lambda x: x.chunk(2, 1)[1],
    "a chunk by name": lambda x: x.chunk(chunks=2, dim=-1)[0],
    "a part": lambda x: x.split([2, 4], 1)[1],
    "a part of equal ones": lambda x: torch.split(x, 4, dim=1)[-1],
    "a part by name": lambda x: x.split(split_size=2, dim=-1)[0],
    "a row": lambda x: x.unbind(1)[-2],
    "a row by name": lambda x: torch.unbind(x, dim=2)[0],
    "contiguous": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    "stack": lambda x: torch.stack([x, x], 1),
}
COPIES: dict[str, Move] = {
    "narrow": lambda x: x.narrow(1, 2, 3),
    "narrow by name": lambda x: torch.narrow(x, dim=-1, start=1, length=2),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "a layer of dropout": nn.Dropout(0.5),
    "a layer of dropout by name": ByName(),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "cat": lambda x: torch.cat([x, x], 1),
    "cat by name": lambda x: torch.cat(tensors=[x, x], dim=-1),
    "roll": lambda x: torch.roll(x, 2, 1),
    "roll of two": lambda x: x.roll((-1, 5), (2, 3)),
    "roll by a size": lambda x: torch.roll(x, shifts=(-(x.shape[2] // 2), 0), dims=(-2, -1)),
    "view as": lambda x: x.view_as(x),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1, -1).flatten(1, 2),
    "expand by a size": lambda x: x[:1].expand(x.shape[0], -1, x.size(2), -1),
}
UNPLANNED: dict[str, Move] = {
    "squeeze all": lambda x: x.unsqueeze(1).squeeze(),
    "tensor_split": lambda x: x.tensor_split(2, 1)[1],
    "narrow from the end": lambda x: x.narrow(1, -3, 2),
    "roll of all": lambda x: x.roll(3),
}


class Between(nn.Module):
    """A move between two int8 layers, or with layer norms around it."""

    def __init__(self, move: Move, *, reals: bool) -> None:
        super().__init__()
        self.move, self.reals = move, reals
        self.one = nn.Conv2d(3, 6, 3)
        self.norms = nn.ModuleList([nn.LayerNorm(4)])
        with torch.no_grad():
            width = move(torch.zeros(2, 6, 4, 4)).shape[-1]
        self.norms.append(nn.LayerNorm(width))
        self.two = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        if self.reals:
            return self.two(self.norms[1](self.move(self.norms[0](y))))
        return self.two(self.move(y))


def converted(move: Move, *, reals: bool) -> ProgramRunner:
    """A network with a move in it, which gives what its float form gives, and the same planned and by steps."""
    torch.manual_seed(0)
    model, x = Between(move, reals=reals).eval(), torch.randn(3, 3, 6, 6)
    q = quant.quantize_static(model, [x], progress=False)
    [runner] = [module for module in q.modules() if isinstance(module, ProgramRunner)]
    for given in (x, torch.randn(2, 3, 6, 6)):
        with torch.no_grad():
            y, expected = q(given), model(given)
            held = runner.held(given)
        error = (y - expected).square().sum() / expected.square().sum()
        assert error < 1e-2
        assert torch.equal(y, held.of(runner.program.values[runner.program.output.index]))
    return runner


@pytest.mark.parametrize("name", [*VIEWS, *COPIES])
def test_a_move_of_integers_is_planned(name: str) -> None:
    runner = converted((VIEWS | COPIES)[name], reals=False)
    schedule = runner.program.schedule
    assert len(schedule.steps) == 1
    assert not schedule.reasons


@pytest.mark.parametrize("name", VIEWS)
def test_a_move_of_reals_is_planned(name: str) -> None:
    runner = converted(VIEWS[name], reals=True)
    assert len(runner.program.schedule.steps) == 1


@pytest.mark.parametrize("name", UNPLANNED)
def test_a_move_without_operations_runs_by_itself(name: str) -> None:
    runner = converted(UNPLANNED[name], reals=False)
    assert any("has no" in reason for reason in runner.program.schedule.reasons.values())


CUTS: dict[str, tuple[Callable[[Tensor], Sequence[Tensor]], tuple[int, ...]]] = {
    "chunk": (lambda y: y.chunk(3, 1), (4, 2)),
    "unbind": (lambda y: y.unbind(1), (5, 7)),
    "split": (lambda y: y.split(4, 1), (4, 9)),
}
"""How six steps are cut, and other numbers of steps that give another number of parts."""


class Counting(nn.Module):
    """The first part of a sequence, times the number of parts."""

    def __init__(self, cut: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.cut = cut
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.cut(self.one(x))
        return self.two(parts[0]) * len(parts)


@pytest.mark.parametrize("name", CUTS)
def test_a_number_of_parts_is_checked_inside_of_a_native_call(name: str) -> None:
    torch.manual_seed(0)
    cut, others = CUTS[name]
    model, x = Counting(cut).eval(), torch.randn(2, 6, 8)
    q = quant.quantize_static(model, [x], progress=False)
    [runner] = [module for module in q.modules() if isinstance(module, ProgramRunner)]
    [region] = [step for step in runner.program.schedule.steps if isinstance(step, Region)]
    assert any(isinstance(one, Guard) for one in region.instructions)
    with torch.no_grad():
        assert (q(x) - model(x)).abs().max() < 0.1
        for length in others:
            other = torch.randn(2, length, 8)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                y = q(other)
            assert (y - model(other)).abs().max() < 0.1
            assert length != others[0] or any(one.category is quant.types.UncapturedCall for one in said)


def test_sizes_that_do_not_sum_up_are_an_error() -> None:
    torch.manual_seed(0)
    model, x = Counting(lambda y: y.split([2, 4], 1)).eval(), torch.randn(2, 6, 8)
    q = quant.quantize_static(model, [x], progress=False)
    for length in (5, 7):
        with torch.no_grad(), pytest.raises(RuntimeError, match="split_with_sizes expects"):
            q(torch.randn(2, length, 8))
