"""The float calls that the integer steps of a program stand for, kept for steps whose module the user replaces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quant.graph import Graph, Kind, Node
from quant.runtime.instructions import FloatCall, Guard, Instruction, renumbered
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.names import attribute, has_submodule
from quant.runtime.program import Program, unread
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.user_replacements import ProgramOrigin
from quant.runtime.values import Value
from quant.static.assembly import callee_of


def origin_of(runner: ProgramRunner, graph: Graph) -> ProgramOrigin:
    """The modules that a program was converted from, as they are at the end of the conversion."""
    floats = float_calls(runner.program, graph)
    named = {path for one in runner.program.instructions for path in one.modules if has_submodule(runner.root, path)}
    int8 = {path for path in named if isinstance(attribute(runner.root, path), (StaticLayer, QuantModule))}
    return ProgramOrigin(runner.root, runner.program, floats, int8)


def float_calls(program: Program, graph: Graph) -> Program:
    """The float calls that integer steps with modules stand for, as a program.

    A program whose values are those of the graph; its inputs are what is read and not computed in it.
    """
    calls = sorted({index for one in program.instructions for index in _replaced_by(one, program, graph)})
    inputs = sorted({ref for index in calls for ref in graph.nodes[index].refs} - set(calls))
    ids = {index: place for place, index in enumerate((*inputs, *calls))}
    values = tuple(_value(graph.nodes[index], place) for index, place in ids.items())
    instructions = [_instruction(graph.nodes[index], ids) for index in calls]
    return Program(values, tuple(ids[one] for one in inputs), instructions, (), unread(instructions, ()), {})


def _replaced_by(instruction: Instruction, program: Program, graph: Graph) -> Iterator[int]:
    """The nodes that an instruction of integers stands for: from its value back to what it reads."""
    if instruction.own or not instruction.modules:
        return
    seen = {program.values[one].node for one in instruction.reads}
    waiting = [program.values[instruction.out].node]
    while waiting:
        index = waiting.pop()
        node = graph.nodes[index]
        if index in seen or node.kind is Kind.INPUT:
            continue
        seen.add(index)
        waiting += node.refs
        yield index


def _value(node: Node, place: int) -> Value:
    return Value(place, node.label, None if node.meta is None else node.meta.dtype, None, None, node.index)


def _instruction(node: Node, ids: dict[int, int]) -> Instruction:
    args, kwargs = renumbered((node.args, node.kwargs), ids)
    out = ids[node.index]
    if node.kind is Kind.GUARD:
        return Guard(out=out, step=node.label, source=args[0].index, expected=args[1], owner=node.owner)
    how: dict[str, Any] = {"owner": node.owner, "frozen": node.frozen, "writes": node.writes}
    return FloatCall(out=out, step=node.label, callee=callee_of(node), args=args, kwargs=kwargs, **how)
