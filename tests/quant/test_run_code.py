"""The function of a run of steps: what it gives, what it frees, whom it names, and that no text becomes source."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from quant.runtime.callee import Callee, Function, Method
from quant.runtime.instructions import FloatCall, Guard, Instruction, IntegerMove
from quant.runtime.matching import CaptureMismatch
from quant.runtime.single_steps import call, single_step
from quant.runtime.step_runs import StepRun, joined
from quant.runtime.trees import Attr, Ref
from quant.runtime.values import Value

REAL = Value(9, "y", torch.float32, (3, 4), None, 9)
INTEGERS = Value(9, "y", torch.uint8, (3, 4), (0.5, 3), 9)
A = Ref(0)


def root() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4))


def run_of(
    steps: list[Instruction], module: nn.Module, value: Value = REAL, drops: list[list[int]] | None = None
) -> StepRun:
    [run], _ = joined(module, steps, drops or [[] for _ in steps], lambda one: single_step(one, module, None, value))
    assert isinstance(run, StepRun)
    return run


CALLS: list[tuple[Callee, tuple[Any, ...], dict[str, Any]]] = [
    (Function("torch", "mul", torch.mul), (A, Attr("1.weight")), {}),
    (Function("torch", "add", torch.add), (A, Attr("1.running_mean")), {"alpha": 2}),
    (Function("builtins", "getattr", getattr), (A, "mT"), {}),
    (Function("operator", "matmul", torch.matmul), (A, Attr("1.weight")), {}),
    (Method("view"), (A, torch.Size((4, 3))), {}),
    (Method("new_zeros"), (A, (Ref(3), 2)), {"dtype": torch.float32}),
]


@pytest.mark.parametrize(("callee", "args", "kwargs"), CALLS)
def test_a_run_gives_what_the_callee_gives(callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    registers = {0: torch.randn(3, 4), 1: torch.randn(3, 4), 2: torch.rand(3, 4) > 0.5, 3: 2}
    instruction, module = FloatCall(out=9, args=args, kwargs=kwargs, callee=callee), root()
    step = single_step(instruction, module, None, REAL)
    expected = call(instruction, module, step.args(registers), step.kwargs(registers))
    assert run_of([instruction], module).run(registers)
    assert torch.equal(registers[9], expected)


def test_a_parameter_that_was_replaced_is_read_anew() -> None:
    module = root()
    run = run_of([FloatCall(out=9, args=(A, Attr("1.weight")), callee=Function("torch", "mul", torch.mul))], module)
    module[1].weight = nn.Parameter(torch.full((4,), 3.0))
    registers: dict[int, Any] = {0: torch.ones(3, 4)}
    assert run.run(registers)
    assert registers[9].eq(3).all()


def test_values_that_nobody_reads_are_freed_while_it_runs() -> None:
    alive: list[int] = []

    def count(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(one() is not None for one in refs))
        return x

    def first(x: torch.Tensor) -> torch.Tensor:
        made = x + 1
        refs.append(weakref.ref(made))
        return made

    refs: list[weakref.ref[torch.Tensor]] = []
    steps: list[Instruction] = [
        FloatCall(out=5, args=(A,), callee=Function("a", "first", first)),
        FloatCall(out=6, args=(Ref(5),), callee=Method("neg")),
        FloatCall(out=7, args=(Ref(6),), callee=Function("a", "count", count)),
    ]
    registers: dict[int, Any] = {0: torch.ones(2)}
    assert run_of(steps, root(), drops=[[0], [5], [6]]).run(registers)
    assert (alive, registers.keys()) == ([0], {7})


def test_a_guard_ends_the_run() -> None:
    steps: list[Instruction] = [
        FloatCall(out=5, args=(A, 0), callee=Method("size")),
        Guard(out=6, source=5, expected=3),
    ]
    run = run_of(steps, root())
    registers: dict[int, Any] = {0: torch.ones(3)}
    assert run.run(registers)
    assert registers[6] == 3
    with pytest.raises(CaptureMismatch, match="decides by a size: it was 3 for example_inputs and is 4 now"):
        run.run({0: torch.ones(4)})


def test_an_error_of_an_integer_move_names_its_step() -> None:
    steps: list[Instruction] = [
        IntegerMove(out=5, step="first", args=(A, 0, 1), callee=Method("transpose")),
        IntegerMove(out=9, step="fold", args=(Ref(5), 5, 5), callee=Method("view")),
    ]
    with pytest.raises(RuntimeError, match=r"layer 'fold' \(%9\): shape '\[5, 5\]' is invalid"):
        run_of(steps, root(), INTEGERS).run({0: torch.zeros(3, 4, dtype=torch.uint8)})


def test_an_error_of_the_users_own_call_stays_as_it_is() -> None:
    run = run_of([FloatCall(out=9, step="own", args=(A, 5, 5), callee=Method("view"))], root())
    with pytest.raises(RuntimeError, match=r"^shape '\[5, 5\]' is invalid"):
        run.run({0: torch.zeros(3, 4)})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_run_is_traced() -> None:
    """The tracer warns of a branch, and imports what it needs for that in the frame of the run."""
    condition = FloatCall(out=5, args=(Ref(1),), callee=Method("__bool__"))
    steps: list[Instruction] = [
        condition,
        Guard(out=6, source=5, expected=True),
        FloatCall(out=9, args=(A,), callee=Method("neg")),
    ]
    run = run_of(steps, root())

    def forward(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        registers: dict[int, Any] = {0: x, 1: flag}
        assert run.run(registers)
        result: torch.Tensor = registers[9]
        return result

    traced = torch.jit.trace(forward, (torch.ones(2), torch.tensor(True)))
    assert traced(torch.full((2,), 3.0), torch.tensor(True)).tolist() == [-3.0, -3.0]


HOSTILE = ("x if bound.append(1) else x", "neg() or print", "e\u0301", "class", "neg\n    print(1)")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_is_none_of_pythons_is_looked_up_and_not_source(name: str) -> None:
    steps: list[tuple[Callee, tuple[Any, ...], dict[str, Any]]] = [
        (Method(name), (A,), {}),
        (Function("builtins", "getattr", getattr), (A, name), {}),
        (Function("torch", "sum", dict), (), {name: A}),
    ]
    for callee, args, kwargs in steps[:2]:
        run = run_of([FloatCall(out=9, args=args, kwargs=kwargs, callee=callee)], root())
        with pytest.raises(AttributeError):
            run.run({0: torch.ones(2)})
    callee, args, kwargs = steps[2]
    registers: dict[int, Any] = {0: 3}
    assert run_of([FloatCall(out=9, args=args, kwargs=kwargs, callee=callee)], root()).run(registers)
    assert registers[9] == {name: 3}
