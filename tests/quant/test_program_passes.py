"""Passes over programs, text in and text out: what is alive, when a value is dropped, what is one native call."""

from __future__ import annotations

import pytest
from torch import nn

from quant.graph import Graph, Kind, Node
from quant.runtime.callee import Function, Method
from quant.runtime.instructions import FloatCall
from quant.runtime.program import Program, live
from quant.runtime.program_reader import parse
from quant.static.assembly import Assembled
from quant.static.native import schedule
from quant.static.native_forms import Planner


def program(*lines: str, output: str) -> Program:
    return parse("\n".join(["octet-program 1", "input %0 x: float32[2, 8]  ; #0", *lines, f"output {output}"]))


QUANTIZE = "%1 x: uint8[2, 8] scale=0.1 zero_point=3 = quantize(%0)  ; #0"
LIVE: dict[str, tuple[tuple[str, ...], str, list[int]]] = {
    "read by the output": ((QUANTIZE,), "%1", [1]),
    "read by nobody": ((QUANTIZE,), "%0", []),
    "read by what is read by nobody": ((QUANTIZE, "%2 y: float32[2, 8] = dequantize(%1)  ; #1"), "%0", []),
    "a guard": (("%1 a: object = method size(%0, 0)  ; #1", "%2 b: object = guard(%1, 2)  ; #2"), "%0", [1, 2]),
    "a module of the user's": (("%1 a: float32[2, 8] = module fc(%0)  ; #1",), "%0", [1]),
    "a write": (("%1 a: float32[2, 8] = method add_(@count, %0)  ; #1 writes",), "%0", [1]),
    "a call": (("%1 a: float32[2, 8] = torch.relu(%0)  ; #1",), "%0", []),
    "an index in an output": (("%1 a: float32[2, 8] = torch.relu(%0)  ; #1",), "{'a': [slice(None, %1, 2)]}", [1]),
}


@pytest.mark.parametrize(("lines", "output", "kept"), LIVE.values(), ids=LIVE)
def test_instructions_that_somebody_reads_are_alive(lines: tuple[str, ...], output: str, kept: list[int]) -> None:
    given = program(*lines, output=output)
    assert [one.out for one in live(given.instructions, given.output)] == kept


def test_a_value_is_dropped_after_its_last_reader() -> None:
    found = program(
        QUANTIZE,
        "%2 a: float32[2, 8] = torch.relu(%0)  ; #1",
        "%3 b: float32[2, 8] = torch.add(%2, %2)  ; #2",
        "%4 c: float32[2, 8] = dequantize(%1)  ; #0",
        "%5 d: float32[2, 8] = torch.relu(%3)  ; #3",
        output="(%4, %0)",
    )
    assert found.drops == [[], [], [2], [1], [3, 5]]


LOOKUP = "%{0} y{0}: uint8[2, 8] scale=0.1 zero_point=3 = octet.lookup(q: %{1}, table: $0)  ; #{0}"
TABLE = "\n$0 = uint8[256]\n  " + "00" * 256


def scheduled(*lines: str, output: str) -> list[str]:
    """The schedule of a program as lines; its float calls are captured calls of the same place."""
    given = program(*lines, output=output + TABLE)
    nodes = [Node(place, Kind.INPUT, "x") for place in range(1 + max(value.node for value in given.values))]
    for one in given.instructions:
        if isinstance(one, FloatCall) and isinstance(one.callee, (Function, Method)):
            place = given.values[one.out].node
            method = isinstance(one.callee, Method)
            target = one.callee.name if isinstance(one.callee, Method) else one.callee.target
            nodes[place] = Node(place, Kind.METHOD if method else Kind.FUNCTION, target, one.args, one.kwargs)
    root = nn.Module()
    planner = Planner(Assembled(given, {}), Graph("", nodes, {}, None, []), root, lambda key: pytest.fail(key))
    return str(schedule(given, planner)).splitlines()


def test_neighbours_with_plans_are_one_native_call() -> None:
    lines = QUANTIZE, LOOKUP.format(2, 1), LOOKUP.format(3, 2), "%4 z: float32[2, 8] = dequantize(%3)  ; #3"
    assert scheduled(*lines, output="%4") == ["native %1 %2 %3 %4 inputs %0 outputs %4 drops %0"]


def test_a_single_conversion_is_a_native_call_of_one_step() -> None:
    assert scheduled(QUANTIZE, output="%1") == ["native %1 inputs %0 outputs %1 drops %0"]


def test_a_float_call_parts_two_native_calls() -> None:
    lines = [
        QUANTIZE,
        LOOKUP.format(2, 1),
        "%3 z: float32[2, 8] = dequantize(%2)  ; #2",
        "%4 a: float32[2, 8] = torch.erf(%3)  ; #4",
        "%5 b: uint8[2, 8] scale=0.1 zero_point=3 = quantize(%4)  ; #4",
        LOOKUP.format(6, 5),
    ]
    assert scheduled(*lines, output="%6") == [
        "native %1 %2 %3 inputs %0 outputs %3 drops %0",
        "single %4 drops %3",
        "native %5 %6 inputs %4 outputs %6 drops %4",
    ]


def test_what_is_read_after_a_native_call_is_one_of_its_outputs() -> None:
    lines = [
        QUANTIZE,
        LOOKUP.format(2, 1),
        LOOKUP.format(3, 2),
        "%4 z: float32[2, 8] = dequantize(%3)  ; #3",
        "%5 a: float32[2, 8] = torch.erf(%4)  ; #5",
        "%6 z: float32[2, 8] = dequantize(%2)  ; #2",
    ]
    assert scheduled(*lines, output="(%5, %6)") == [
        "native %1 %2 %3 %4 inputs %0 outputs %2 %4 drops %0",
        "single %5 drops %4",
        "native %6 inputs %2 outputs %6 drops %2",
    ]


def test_moves_of_reals_at_the_edge_of_a_native_call_stay_outside() -> None:
    lines = [
        "%1 v: float32[8, 2] = method reshape(%0, 8, 2)  ; #1",
        "%2 v: uint8[8, 2] scale=0.1 zero_point=3 = quantize(%1)  ; #1",
        LOOKUP.format(3, 2),
    ]
    assert scheduled(*lines, output="%3") == [
        "single %1 drops %0",
        "native %2 %3 inputs %1 outputs %3 drops %1",
    ]


def test_a_size_that_is_read_inside_is_given_after_it() -> None:
    lines = [
        QUANTIZE,
        LOOKUP.format(2, 1),
        "%3 s: object = method size(%2, 0)  ; #3",
        LOOKUP.format(4, 2),
    ]
    assert scheduled(*lines, output="(%4, %3)") == ["native %1 %2 %3 %4 inputs %0 outputs %2 %4 tail %3 drops %0 %2"]
