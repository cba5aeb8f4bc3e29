"""Steps that run by themselves: a function is called without looking at the trees of its arguments."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn

import quant
from quant.runtime.callee import Callee, Function, Method, Submodule
from quant.runtime.instructions import FloatCall
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.single_steps import call, single_step
from quant.runtime.trees import Ref


def function(target: Any) -> Function:
    return Function("torch", target.__name__, target)


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
]


@pytest.mark.parametrize(("callee", "args", "kwargs"), CALLS)
def test_a_direct_call_gives_what_the_callee_gives(
    callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    registers = {0: torch.randn(3, 4), 1: torch.randn(3, 4), 2: torch.rand(3, 4) > 0.5, 3: 2}
    instruction = FloatCall(out=9, args=args, kwargs=kwargs, callee=callee)
    step = single_step(instruction, nn.Identity(), None)
    assert step.direct is not None
    expected = call(instruction, nn.Identity(), step.args(registers), step.kwargs(registers))
    assert torch.equal(step.direct(registers), expected)


@pytest.mark.parametrize(
    ("callee", "kwargs"),
    [(Submodule("0"), {}), (function(nn.functional.dropout), {"training": False})],
)
def test_what_depends_on_the_module_is_no_direct_call(callee: Callee, kwargs: dict[str, Any]) -> None:
    instruction = FloatCall(out=9, args=(A,), kwargs=kwargs, callee=callee)
    assert single_step(instruction, nn.Sequential(nn.ReLU()), None).direct is None


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
