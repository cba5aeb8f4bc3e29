"""Programs for direct calls of the parts of a converted model that its graph sees through."""

from __future__ import annotations

from torch import nn

from quant.fusion.fused_graph import FusedGraph
from quant.graph import Span, expected_input
from quant.runtime.expected_call import ExpectedCall, ExpectedInput
from quant.runtime.instructions import registers_in
from quant.runtime.part import Part
from quant.runtime.program_runner import ProgramRunner
from quant.static.assembly import Assembled, AssemblyContext, OutOfReach, Site, assemble
from quant.static.native import Unscheduled
from quant.static.native_forms import Planner


def add_parts(
    root: nn.Module, fused: FusedGraph, context: AssemblyContext, sites: dict[int, Site], runner: ProgramRunner
) -> list[Unscheduled]:
    """Give every submodule that was seen through a forward that runs its span of the program; gives these programs."""
    done: set[int] = set()
    unscheduled: list[Unscheduled] = []
    for span in sorted(fused.graph.spans, key=lambda span: span.start):
        module = root.get_submodule(span.path)
        if id(module) not in done:
            done.add(id(module))
            made = _assembled(span, fused, context, sites)
            if isinstance(made, Assembled):
                planner = Planner(made, fused.graph, runner.root, runner.layer)
                unscheduled.append(Unscheduled(made.program, planner))
            program = made if isinstance(made, str) else made.program
            module.__dict__["forward"] = Part(module, span.path, program, runner).run
    return unscheduled


def _assembled(span: Span, fused: FusedGraph, context: AssemblyContext, sites: dict[int, Site]) -> Assembled | str:
    inside = range(span.start, span.end)
    steps = [step for step in fused.steps if all(index in inside for index in step.nodes)]
    try:
        return assemble(fused, steps, _expected(span, fused), span.output, context, sites)
    except OutOfReach as value:
        return f"{value} is computed together with what lies outside of it"


def _expected(span: Span, fused: FusedGraph) -> ExpectedCall:
    """The calls that the stretch of the graph stands for."""
    inputs = {
        value: _input(fused, value, name)
        for name, tree in span.arguments.items()
        for value in sorted(registers_in(tree))
    }
    return ExpectedCall(span.path, span.arguments, inputs)


def _input(fused: FusedGraph, value: int, name: str) -> ExpectedInput:
    """What is expected of a value of the graph: anything where it is no tensor."""
    if fused.graph.nodes[value].meta is None:
        return ExpectedInput(name, object)
    return expected_input(fused.graph, value, name, fused.slot_of, ranked=fused.ranked)
