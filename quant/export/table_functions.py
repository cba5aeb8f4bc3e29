"""The functions that look-up tables of a program stand for, as the calls that the user's forward makes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quant.graph import Graph, Node, evaluate
from quant.runtime.instructions import KernelCall
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.trees import Ref
from quant.static.kept_graph import graph_of


@dataclass(frozen=True)
class TableFunction:
    """Calls of a graph that are a function of one value.

    Attributes:
        source: the node of that value.
        nodes: the calls in order; the last gives the function's value.
    """

    source: int
    nodes: tuple[Node, ...]

    def __call__(self, x: Tensor, root: nn.Module) -> Tensor:
        values = {self.source: x}
        for node in self.nodes:
            values[node.index] = evaluate(node, root, values.__getitem__)
        return values[self.nodes[-1].index]


def functions_of_tables(runner: ProgramRunner) -> dict[int, TableFunction]:
    """Id of a table's value -> its function, where the captured calls are one of a single value."""
    program, functions = runner.program, {}
    tables = [one for one in program.instructions if isinstance(one, KernelCall) and one.table is not None]
    graph = graph_of(runner) if tables else None
    for one in tables:
        source = next(arg for arg in one.args if isinstance(arg, Ref))
        function = _function(graph, program.values[source.index].node, program.values[one.out].node)  # type: ignore[arg-type]
        if function is not None:
            functions[one.out] = function
    return functions


def _function(graph: Graph, source: int, output: int) -> TableFunction | None:
    """The calls from one node to another; None where they read anything else."""
    calls, waiting = set[int](), [output]
    while waiting:
        index = waiting.pop()
        if index == source or index in calls:
            continue
        refs = graph.nodes[index].refs
        if index < source or not refs:
            return None
        calls.add(index)
        waiting += refs
    return TableFunction(source, tuple(graph.nodes[index] for index in sorted(calls))) if calls else None
