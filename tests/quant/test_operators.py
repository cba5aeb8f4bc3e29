"""Operators of one file each: what the registry refuses, and that a new one needs nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from quant.kernels.reference_ops import OPS, reference_kernel
from torch import Tensor, nn

import quant
from quant.ops import registry
from quant.ops.call import Call
from quant.ops.lowering import Context, Kernel
from quant.ops.operator import Operator
from quant.ops.registry import Recognised, recognises
from quant.ops.step import Step
from quant.static.program import Program

NAME = "largest_of_two"


@dataclass(frozen=True)
class Maximum(Operator):
    """The larger of two values that have one range."""

    name: ClassVar[str] = NAME
    shares_range: ClassVar[bool] = True

    def lower(self, step: Step, context: Context) -> Kernel:
        return Kernel(NAME, tuple(map(context.integers, step.inputs)))


def largest_of_two(q_a: Tensor, q_b: Tensor) -> Tensor:
    return torch.maximum(q_a, q_b)


def maximum(call: Call) -> Recognised:
    return Recognised(Maximum(), (call.activation(0), call.activation(1, "other")))


@pytest.fixture
def added() -> Iterator[None]:
    """The operator, as the file of a family in quant/ops/ would add it."""
    recognises(torch.maximum)(maximum)
    reference_kernel(NAME)(largest_of_two)
    yield
    del registry._FUNCTIONS[torch.maximum], OPS[NAME]


class Maxout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.maximum(self.one(x), self.two(x)))


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def program_of(q: nn.Module) -> Program:
    program = q.program
    assert isinstance(program, Program)
    return program


@pytest.mark.usefixtures("added")
def test_a_new_elementwise_operator_takes_one_file() -> None:
    torch.manual_seed(0)
    model = Maxout().eval()
    prepared = quant.prepare(model, images())
    with torch.no_grad():
        prepared(images())
        q = quant.convert(prepared)
        error = (q(images()) - model(images())).square().sum() / model(images()).square().sum()
    assert error < 1e-3
    assert quant.parity(prepared, q, [images()]).holds
    assert [one.kind for one in program_of(q).instructions] == ["quantize", "layer", "layer", NAME, "layer"]


@pytest.mark.usefixtures("added")
def test_a_new_operator_trains_for_int8() -> None:
    torch.manual_seed(0)
    prepared = quant.prepare_qat(Maxout(), images()).train()
    prepared(images()).square().sum().backward()
    q = quant.convert(prepared.eval())
    assert quant.parity(prepared, q, [images()]).holds


def test_without_it_the_call_stays_float() -> None:
    q = quant.quantize_static(Maxout().eval(), [images()], progress=False)
    assert "call" in [one.kind for one in program_of(q).instructions]


def test_two_functions_for_one_call_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one function to recognise it, quant\.ops\.lookup does"):
        recognises(torch.relu)(maximum)
    assert registry._FUNCTIONS[torch.relu] is not maximum


def test_two_kernels_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="kernel 'add': expected a name that no kernel has"):
        reference_kernel("add")(largest_of_two)
    assert OPS["add"] is not largest_of_two
