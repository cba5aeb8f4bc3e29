"""Steps that run by themselves: a function is called without looking at the trees of its arguments."""

from __future__ import annotations

import copy
import operator
from typing import Any
from unittest import mock

import pytest
import torch
from quant.kernels import dispatch
from torch import nn

import quant
from quant.runtime.callee import Callee, Function, Method, Submodule
from quant.runtime.instructions import FloatCall, Guard, Quantize
from quant.runtime.matching import CaptureMismatch
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.single_steps import call, single_step
from quant.runtime.step_runs import StepRun, joined
from quant.runtime.trees import Ref
from quant.runtime.values import Value


def function(target: Any) -> Function:
    return Function("torch", target.__name__, target)


VALUE = Value(9, "y", torch.float32, (3, 4), None, 9)
planned = pytest.mark.skipif(
    not dispatch.current().plans, reason="without the compiled kernels all steps run one by one"
)


def relative(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y - expected).norm() / expected.norm())


A, B = Ref(0), Ref(1)
CALLS: list[tuple[Callee, tuple[Any, ...], dict[str, Any]]] = [
    (function(torch.relu), (A,), {}),
    (function(torch.add), (A, B), {}),
    (function(torch.add), (A, 2.5), {}),
    (function(torch.add), (2.5, A), {}),
    (function(torch.add), (A, B), {"alpha": 2}),
    (function(torch.where), (Ref(2), A, B), {}),
    (function(torch.cat), ([A, B],), {"dim": 1}),
    (function(operator.getitem), (A, (slice(None), 1)), {}),
    (function(operator.getitem), (A, (slice(0, Ref(3)),)), {}),
    (function(torch.ones), (), {"size": (2, 3)}),
    (Method("neg"), (A,), {}),
    (Method("sum"), (A, 1), {}),
    (Method("sum"), (A,), {"dim": 0, "keepdim": True}),
    (Method("reshape"), (A, Ref(3), -1), {}),
    (Method("add"), (A, B), {"alpha": 3}),
    (Submodule("0"), (A,), {}),
    (Submodule(""), (A,), {}),
]


@pytest.mark.parametrize(("callee", "args", "kwargs"), CALLS)
def test_a_direct_call_gives_what_the_callee_gives(
    callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    registers = {0: torch.randn(3, 4), 1: torch.randn(3, 4), 2: torch.rand(3, 4) > 0.5, 3: 2}
    instruction = FloatCall(out=9, args=args, kwargs=kwargs, callee=callee)
    root = nn.Sequential(nn.ReLU())
    step = single_step(instruction, root, None, VALUE)
    assert step.direct is not None
    expected = call(instruction, root, step.args(registers), step.kwargs(registers))
    assert torch.equal(step.direct(registers), expected)
    [run], _ = joined(root, [instruction], [[]], lambda _: step)
    assert isinstance(run, StepRun)
    assert run.run(registers)
    assert torch.equal(registers[9], expected)


def test_a_call_that_follows_its_owners_mode_is_no_direct_call() -> None:
    instruction = FloatCall(out=9, args=(A,), kwargs={"training": False}, callee=function(nn.functional.dropout))
    assert single_step(instruction, nn.Sequential(nn.ReLU()), None, VALUE).direct is None


def test_a_module_that_gave_a_tensor_must_give_one() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    root = nn.Sequential(nn.ReLU())
    step = single_step(FloatCall(out=9, args=(A,), kwargs={}, callee=Submodule("0")), root, None, VALUE)
    assert step.direct is not None
    root[0] = Pair()
    with pytest.raises(CaptureMismatch, match="0 gave a tensor for example_inputs and gives a tuple now") as raised:
        step.direct({0: torch.ones(1)})
    assert raised.value.place == VALUE.node


def test_a_direct_guard_checks() -> None:
    guard = single_step(Guard(out=9, source=0, expected=3, owner="0"), nn.Sequential(nn.ReLU()), None, VALUE)
    assert guard.direct is not None
    assert guard.direct({0: 3}) == 3
    with pytest.raises(CaptureMismatch, match="decides by a size: it was 3 for example_inputs and is 4 now"):
        guard.direct({0: 4})


class Steps(nn.Module):
    """Between two layers, functions that no plan has, in a module of their own; a size decides how often."""

    class Middle(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.erfinv(torch.atan(x) * 0.5)
            for _ in range(2 if x.size(1) <= 4 else 3):
                x = torch.erfinv(torch.atan(x) * 0.5)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), self.Middle(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def converted() -> tuple[nn.Module, ProgramRunner]:
    torch.manual_seed(0)
    q = quant.quantize_static(Steps().eval(), [torch.randn(8, 4, 4) for _ in range(4)], progress=False)
    [runner] = (one for one in q.modules() if isinstance(one, ProgramRunner))
    return q, runner


def runs(runner: ProgramRunner) -> list[StepRun]:
    return [step for _, (steps, _) in runner._joined.values() for step in steps if isinstance(step, StepRun)]


def test_neighbouring_calls_are_one_step_that_drops_what_nobody_reads() -> None:
    steps = [
        FloatCall(out=1, args=(Ref(0),), callee=function(torch.relu)),
        FloatCall(out=2, args=(Ref(1), 1.0), callee=function(torch.add)),
        Quantize(out=3, source=2, scale=1.0, zero_point=0),
        FloatCall(out=4, args=(Ref(2),), callee=Method("neg")),
    ]
    drops = [[0], [1], [], [2, 7]]
    made, after = joined(nn.ReLU(), steps, drops, lambda one: single_step(one, nn.ReLU(), None, VALUE))
    [first, single, last] = made
    assert isinstance(first, StepRun)
    assert isinstance(last, StepRun)
    assert (single, after) == (steps[2], [[], [], []])
    assert (first.instructions, first.drops) == (steps[:2], drops[:2])
    registers: dict[int, Any] = {0: torch.tensor([-1.0, 2.0])}
    assert first.run(registers)
    assert registers.keys() == {2}
    assert last.run(registers)
    assert registers.keys() == {4}
    assert registers[4].tolist() == [-1.0, -3.0]


@planned
def test_a_run_gives_what_its_instructions_give_one_by_one() -> None:
    q, runner = converted()
    assert max(len(run.instructions) for run in runs(runner)) >= 6
    x = torch.randn(2, 4, 4)
    with mock.patch.object(StepRun, "run", return_value=False):
        expected = q(x)
    assert torch.equal(q(x), expected)


@planned
def test_a_guard_in_a_run_sends_other_calls_to_the_users_forward() -> None:
    q, runner = converted()
    assert any(isinstance(one, Guard) for run in runs(runner) for one in run.instructions)
    torch.manual_seed(0)
    model, x = Steps().eval(), torch.randn(2, 5, 4)
    with pytest.warns(quant.types.UncapturedCall, match="decides by a condition"):
        y = q(x)
    assert relative(y, model(x).detach()) < 0.05


@planned
def test_a_copy_has_runs_of_its_own() -> None:
    q, runner = converted()
    x = torch.randn(2, 4, 4)
    expected = q(x)
    twin = copy.deepcopy(q)
    assert torch.equal(twin(x), expected)
    [other] = (one for one in twin.modules() if isinstance(one, ProgramRunner))
    own = {id(edge.children) for run in runs(runner) for edge in run.edges}
    assert own
    assert own.isdisjoint(id(edge.children) for run in runs(other) for edge in run.edges)


@planned
def test_runs_are_joined_anew_where_a_module_is_a_copy_now() -> None:
    q, runner = converted()
    x = torch.randn(2, 4, 4)
    expected = q(x)
    q.middle = copy.deepcopy(q.middle)
    assert torch.equal(q(x), expected)
    assert torch.equal(q(x), expected)
    assert all(edge.stands() for run in runs(runner) for edge in run.edges)
    assert runs(runner)


def test_direct_calls_of_a_replaced_module_are_not_run() -> None:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(x * 0.1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale, self.last = nn.Linear(4, 4), Scale(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.scale(self.first(x)))

    torch.manual_seed(0)
    q = quant.quantize_static(Net().eval(), [torch.randn(8, 4, 4) for _ in range(4)], progress=False)
    x = torch.randn(2, 4, 4)
    [runner] = (one for one in q.modules() if isinstance(one, ProgramRunner))
    q(x)
    assert any(step.direct is not None for step in runner._steps_known.values())
    q.scale = nn.Identity()
    with pytest.raises(RuntimeError, match="layer 'scale': it was replaced after"):
        q(x)
