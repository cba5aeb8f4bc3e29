"""Operators of one file each: what the registry refuses, and that a new one needs nothing elsewhere."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from quant.kernels.reference_ops import OPS, reference_kernel
from torch import Tensor, nn

import quant
from quant.ops import registry
from quant.ops.call import Call
from quant.ops.lowering import Context, Kernel
from quant.ops.norm import layer_norm
from quant.ops.operator import Operator
from quant.ops.registry import Recognised, plans_reals, recognises
from quant.ops.step import Step
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner

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


@pytest.fixture
def added_view() -> Iterator[dict[str, Any]]:
    with mock.patch.dict(registry._FUNCTIONS):
        yield runpy.run_path(str(Path(__file__).with_name("added_view.py")))


class Columns(nn.Module):
    """Channels moved to the end for a linear layer, between integers and, `halfway`, between reals."""

    def __init__(self, *, halfway: bool) -> None:
        super().__init__()
        self.halfway = halfway
        self.one, self.norm, self.two = nn.Conv2d(3, 6, 3), nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.moveaxis(self.one(x), 1, -1)
        return self.two(self.norm(y) if self.halfway else y)


def naming(word: str) -> list[Path]:
    """The files of the package that have a word in them, but for exporters, which have a file of their own for it."""
    root = Path(__file__).parents[2]
    files = [path for folder in ("quant", "kernels") for path in (root / folder).rglob("*.*")]
    files = [path for path in files if path.suffix in (".py", ".cpp", ".h", ".inc")]
    return [path for path in files if "onnx" not in path.parts and word in path.read_text().lower()]


@pytest.mark.parametrize("halfway", [False, True], ids=["between integers", "before a norm"])
def test_a_new_view_takes_one_file(added_view: dict[str, Any], *, halfway: bool) -> None:
    torch.manual_seed(0)
    model = Columns(halfway=halfway).eval()
    q = quant.quantize_static(model, [images()], progress=False)
    [runner] = [module for module in q.modules() if isinstance(module, ProgramRunner)]
    with torch.no_grad():
        error = (q(images()) - model(images())).square().sum() / model(images()).square().sum()
        stepwise = runner.held(images()).of(runner.program.values[runner.program.output.index])
        assert torch.equal(q(images()), stepwise)
    assert error < 1e-3
    schedule = runner.program.schedule
    assert not schedule.reasons
    [region] = schedule.regions
    moves = [str(piece).split(" = ")[1] for piece in region.pieces if "transpose" in str(piece)]
    assert [move.partition("dim0")[2] for move in moves] == ["=1 dim1=2", "=2 dim1=3"]
    assert naming("swapaxes")
    assert not naming("moveaxis")


def test_without_it_the_view_is_a_float_call() -> None:
    q = quant.quantize_static(Columns(halfway=False).eval(), [images()], progress=False)
    assert [one.kind for one in program_of(q).instructions] == ["quantize", "layer", "call", "quantize", "layer"]


def test_two_functions_for_one_call_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one function to recognise it, quant\.ops\.lookup does"):
        recognises(torch.relu)(maximum)
    assert registry._FUNCTIONS[torch.relu] is not maximum


def test_two_plans_of_one_float_call_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one function to plan it, quant\.ops\.norm does"):
        plans_reals(nn.LayerNorm)(lambda call: [])
    form = registry._REAL_FORMS[nn.LayerNorm]
    assert form.plan is layer_norm
    assert not form.exact


def test_two_kernels_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="kernel 'add': expected a name that no kernel has"):
        reference_kernel("add")(largest_of_two)
    assert OPS["add"] is not largest_of_two
