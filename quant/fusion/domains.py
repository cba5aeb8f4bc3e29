"""Which steps compute in integers and which in float, decided by their neighbours."""

from __future__ import annotations

from quant.fusion.float_values import float_streams, wanted_unrounded
from quant.graph import Graph
from quant.ops.operator import Float
from quant.ops.step import Step
from quant.ops.views import View


def choose_domains(steps: list[Step], graph: Graph, users: dict[int, list[int]], rules: int) -> None:
    """Make steps float that have no integer neighbour on both sides; layers decide, the steps between them follow."""
    by_node = {index: step for step in steps for index in step.nodes}
    computing = {step.output for step in steps if _is_computation(step)}
    moving = {step.output for step in steps if isinstance(step.operator, View)}

    def demote(step: Step, reason: str) -> None:
        step.operator, step.inputs = Float(reason, form=step.operator if len(step.nodes) == 1 else None), ()

    def demote_unread() -> None:
        for step in reversed(steps):
            if not step.integer or step.operator.anchor:
                continue
            readers = [by_node[user] for user in users[step.output] if user < len(graph.nodes)]
            # A cell is an integer step, but reads its state as a float.
            if not any(reader.integer and step.output in reader.inputs for reader in readers):
                demote(step, "what reads it is float")

    def demote_fed_by_float() -> None:
        for step in steps:
            if step.integer and not step.operator.anchor and not any(by_node[value].integer for value in step.inputs):
                demote(step, "what it reads is float")

    def demote_parts() -> None:
        for step in steps:
            if isinstance(step.operator, View) and _part_of_float(step, graph, by_node):
                demote(step, "what it reads is float")

    demote_fed_by_float()
    demote_unread()
    demote_parts()
    for step in float_streams(steps, users, computing, moving) if rules > 1 else ():
        demote(step, "float steps read it too")
    if rules > 2:
        for step in wanted_unrounded(steps, users):
            demote(step, "float steps or the caller read it too")
        demote_fed_by_float()
        demote_parts()
    demote_unread()


def _is_computation(step: Step) -> bool:
    """Whether a step is float because no kernel has integers for it."""
    return isinstance(step.operator, Float) and not step.operator.has_integer_form


def _part_of_float(step: Step, graph: Graph, by_node: dict[int, Step]) -> bool:
    """Whether the step takes an item of a float step's tuple, which cannot be quantised as one tensor."""
    return graph.nodes[step.inputs[0]].meta is None and not by_node[step.inputs[0]].integer
