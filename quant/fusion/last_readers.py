"""Which step reads each value last, so that a runner can free its memory."""

from __future__ import annotations

from quant.fusion.fused_graph import FusedGraph
from quant.runtime.trees import Ref, leaves


def last_readers(fused: FusedGraph) -> dict[int, list[int]]:
    """Step, by its output -> the values that it reads last; they can be dropped after it.

    The output of the graph stays, and so do values within a step, which the step itself drops.
    """
    kept = {leaf.index for leaf in leaves(fused.graph.output) if isinstance(leaf, Ref)}
    last: dict[int, int] = {}
    for step in fused.steps:
        for index in step.nodes:
            for ref in fused.graph.nodes[index].refs:
                last[ref] = step.output
        last.setdefault(step.output, step.output)
    inner = {index for step in fused.steps for index in step.nodes[:-1]}
    dead: dict[int, list[int]] = {}
    for value, reader in last.items():
        if value not in kept and value not in inner:
            dead.setdefault(reader, []).append(value)
    return dead
