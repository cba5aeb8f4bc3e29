"""The values of a converted program: an id each, and a shape whose sizes follow from the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.graph import Graph, Kind, Node, TensorMeta
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.values import Size, Value
from quant.static.symbolic_shapes import SymbolicShapes


class Windows(nn.Module):
    """Rows of windows: sizes that are an input's, a multiple of it, and off it by a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.last = nn.Conv1d(3, 8, 3), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(self.conv(x).transpose(1, 2))
        return self.last(torch.cat([y, y]).relu()), torch.softmax(y.reshape(-1, 8), dim=0)


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    q = quant.quantize_static(Windows().eval(), [torch.randn(4, 3, 16)], progress=False)
    runner = q._modules["_quant"]
    assert isinstance(runner, ProgramRunner)
    return runner.program


def test_ids_are_dense_and_every_value_is_an_input_or_is_made_once(program: Program) -> None:
    assert [value.id for value in program.values] == list(range(len(program.values)))
    made = [*program.inputs, *(one.out for one in program.instructions)]
    assert sorted(made) == list(range(len(program.values)))
    assert all(one.reads <= set(made[:place]) for place, one in enumerate(program.instructions, len(program.inputs)))


def test_integers_have_a_scale_and_a_zero_point_and_reals_have_none(program: Program) -> None:
    assert {value.dtype for value in program.values if value.qparams} == {torch.uint8}
    assert torch.uint8 not in {value.dtype for value in program.values if not value.qparams}
    [given] = [program.values[one] for one in program.inputs]
    assert given == Value(0, "x_0", torch.float32, (Size("n"), 3, Size("s1")), None, 0)


def shapes(program: Program) -> dict[str, tuple[str, ...]]:
    return {value.name: tuple(map(str, value.shape or ())) for value in program.values}


def test_sizes_are_said_in_terms_of_the_inputs(program: Program) -> None:
    found = shapes(program)
    assert found["conv"] == ("n", "8", "s1-2")
    assert found["last"] == ("2*n", "s1-2", "2")
    assert program.sizes == {"n": 4, "s1": 16, "s2": 56}
    assert [shape for name, shape in found.items() if name.startswith("reshape")] == [("s2", "8")]
    assert program.shape(0) == (4, 3, 16)


def graph(*shapes: tuple[tuple[int, ...], ...]) -> Graph:
    """Inputs and one call, of which only the shapes in several recordings count."""
    nodes = [
        Node(
            place,
            Kind.INPUT if place < len(shapes) - 1 else Kind.FUNCTION,
            "x",
            meta=TensorMeta(seen[0], torch.float32),
        )
        for place, seen in enumerate(shapes)
    ]
    for node, seen in zip(nodes, shapes, strict=True):
        for other in seen[1:]:
            node.note_other_shape(Node(0, Kind.INPUT, "x", meta=TensorMeta(other, torch.float32)))
    return Graph("", nodes, {}, None, [])


CASES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "the same": ((((4, 8), (5, 8)), ((4, 3), (5, 3))), ("n", "3")),
    "a multiple before an offset": ((((4,), (5,)), ((8,), (10,))), ("2*n",)),
    "the smallest multiple": ((((2, 4), (3, 6)), ((8,), (12,))), ("2*s1",)),
    "the nearest offset": ((((4, 16), (5, 17)), ((18,), (19,))), ("s1+2",)),
    "neither": ((((4,), (5,)), ((10,), (3,))), ("s1",)),
    "three recordings": ((((4, 6), (5, 6), (4, 7)), ((24, 6), (30, 6), (28, 7))), ("s2", "s1")),
    "one recording": ((((4, 6),), ((24,),)), ("24",)),
    "none of it": ((((4,), (5,)), ((0,), (1,))), ("n-4",)),
}


@pytest.mark.parametrize(("seen", "expected"), CASES.values(), ids=CASES)
def test_a_size_is_a_multiple_or_off_by_a_constant_or_of_its_own(seen: Any, expected: tuple[str, ...]) -> None:
    found = SymbolicShapes(graph(*seen)).shape(1)
    assert found is not None
    assert tuple(map(str, found)) == expected


def test_a_recording_of_another_rank_tells_nothing() -> None:
    made = graph(((4, 8), (5, 8)), ((4, 8), (5,)))
    found = SymbolicShapes(made)
    assert (found.shape(0), found.shape(1)) == ((Size("n"), 8), (4, 8))
