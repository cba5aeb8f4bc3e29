"""Programs for the parts of a converted model that its graph sees through: they may be called by themselves."""

from __future__ import annotations

from torch import nn

from quant.fuse import Plan
from quant.graph import Span, expected_input
from quant.runtime.expected_call import ExpectedCall, ExpectedInput
from quant.runtime.instructions import registers_in
from quant.runtime.part import Part
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.static.assembly import AssemblyContext, OutOfReach, Site, assemble
from quant.static.native import schedule
from quant.static.native_forms import Planner


def add_parts(
    root: nn.Module, plan: Plan, context: AssemblyContext, sites: dict[int, Site], runner: ProgramRunner
) -> None:
    """Give every submodule that was seen through a forward of its own stretch of the program."""
    done: set[int] = set()
    for span in sorted(plan.graph.spans, key=lambda span: span.start):
        module = root.get_submodule(span.path)
        if id(module) not in done:
            done.add(id(module))
            part = Part(module, span.path, _program(span, plan, context, sites, runner), runner)
            module.__dict__["forward"] = part.run


def _program(
    span: Span, plan: Plan, context: AssemblyContext, sites: dict[int, Site], runner: ProgramRunner
) -> Program | str:
    inside = range(span.start, span.end)
    steps = [step for step in plan.steps if all(index in inside for index in step.nodes)]
    try:
        assembled = assemble(plan, steps, _expected(span, plan), span.output, context, sites)
    except OutOfReach as value:
        return f"{value} is computed together with what lies outside of it"
    assembled.program.schedule = schedule(assembled.program, Planner(assembled, plan.graph, runner.root, runner.layer))
    return assembled.program


def _expected(span: Span, plan: Plan) -> ExpectedCall:
    """The calls that the stretch of the graph stands for."""
    inputs = {
        value: _input(plan, value, name)
        for name, tree in span.arguments.items()
        for value in sorted(registers_in(tree))
    }
    return ExpectedCall(span.path, span.arguments, inputs)


def _input(plan: Plan, value: int, name: str) -> ExpectedInput:
    """What is expected of a value of the graph: anything where it is no tensor."""
    if plan.graph.nodes[value].meta is None:
        return ExpectedInput(name, object)
    return expected_input(plan.graph, value, name, plan.slot_of)
