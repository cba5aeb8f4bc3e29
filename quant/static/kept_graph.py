"""The captured graph of a converted module, kept beside its program for `compare` and `parity`; it is not run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from quant.graph import Graph
from quant.runtime.program_runner import ProgramRunner
from quant.static.graph_text import parse_graph

ATTRIBUTE = "_captured_graph"


@dataclass(frozen=True)
class GraphText:
    """The text of a graph in a file, parsed when it is first asked for.

    Attributes:
        constants: the tensors that it names.
        packages: the packages whose classes it may name.
    """

    text: str
    constants: list[Tensor]
    packages: Collection[str]

    def read(self) -> Graph:
        """Parse the graph.

        Raises:
            TextError: the text is not a graph.
        """
        return parse_graph(self.text, self.constants, self.packages)


def keep_graph(runner: ProgramRunner, graph: Graph | GraphText) -> None:
    """Keep the graph from which a program was converted."""
    runner.__dict__[ATTRIBUTE] = graph


def graph_of(runner: ProgramRunner) -> Graph:
    """The graph from which a program was converted.

    Raises:
        ValueError: none is kept: the program was not converted or loaded by this library.
    """
    graph = runner.__dict__.get(ATTRIBUTE)
    if isinstance(graph, GraphText):
        graph = graph.read()
        keep_graph(runner, graph)
    if not isinstance(graph, Graph):
        raise ValueError(
            f"{runner.expected.path or type(runner.root).__name__}: its program has no captured graph beside it; "
            "convert the float model again to compare them"
        )
    return graph
