"""A step that runs by itself and needs nothing of the native call before it runs ahead of that call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from quant.kernels import dispatch
from torch import Tensor, nn

import quant
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.region import Region

planned = pytest.mark.skipif(
    not dispatch.current().plans, reason="without the compiled kernels all steps run one by one"
)


class Net(nn.Module):
    """Numbers, and something else that functions without a plan make ready between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        return self.last(y + self.looked_up(x, places))

    def looked_up(self, x: Tensor, places: Tensor) -> Tensor:
        return places[:, :1].double().erf().float().expand(-1, 16)


class ChangesItsInput(Net):
    def looked_up(self, x: Tensor, places: Tensor) -> Tensor:
        return F.relu(x, True).sum(1, keepdim=True).erf().expand(-1, 16)


class KeepsSomething(Net):
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, places: Tensor) -> Tensor:
            self.calls += int(places.sum().item() >= 0)
            return places[:, :1].double().erf().float().expand(-1, 16)

    def __init__(self) -> None:
        super().__init__()
        self.counter = self.Counter()

    def looked_up(self, x: Tensor, places: Tensor) -> Tensor:
        return self.counter(places)  # type: ignore[no-any-return]


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=made), torch.randint(10, (6, 2), generator=made)


def converted(kind: type[Net]) -> tuple[nn.Module, nn.Module, ProgramRunner]:
    torch.manual_seed(0)
    model = kind().eval()
    q = quant.quantize_static(model, [inputs(seed) for seed in range(4)], progress=False)
    [runner] = (one for one in q.modules() if isinstance(one, ProgramRunner))
    return model, q, runner


def order(runner: ProgramRunner) -> str:
    assert runner.program.schedule is not None
    return "".join("R" if isinstance(one, Region) else "s" for one in runner.program.schedule.steps)


@pytest.mark.parametrize("kind", [Net, ChangesItsInput, KeepsSomething])
def test_the_bits_are_those_of_the_steps_one_by_one(kind: type[Net]) -> None:
    model, q, runner = converted(kind)
    x, places = inputs(9)
    with torch.no_grad():
        y = q(x.clone(), places)
        assert torch.equal(runner.held(x.clone(), places).reals[runner.program.values[-1].node], y)
        expected = model(x.clone(), places)
    assert float((y - expected).norm() / expected.norm()) < 0.05


class LikeAnother(Net):
    """What `type_as` is asked for the native call does not read; the same call step by step does."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        like = x.erf()
        return self.last(torch.relu(self.first(x)).type_as(like))  # type: ignore[no-any-return]


@planned
def test_a_call_with_nan_finds_what_only_its_steps_read() -> None:
    model, q, runner = converted(LikeAnother)
    assert "R" in order(runner)
    x, places = inputs(9)
    x[2, 3] = torch.nan
    with torch.no_grad():
        assert torch.equal(q(x, places).isnan(), model(x, places).isnan())


@planned
def test_what_needs_nothing_of_the_layers_runs_ahead_of_both() -> None:
    steps = order(converted(Net)[2])
    assert steps.count("R") == 1
    assert len(steps.rstrip("s")) > 3


@planned
@pytest.mark.parametrize("kind", [ChangesItsInput, KeepsSomething])
def test_what_changes_something_keeps_its_place(kind: type[Net]) -> None:
    assert order(converted(kind)[2]).startswith("R")
