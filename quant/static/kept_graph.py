"""The captured graph of a converted module, kept beside its program for `compare` and `parity`: nothing runs by it."""

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
    """A graph of a file, which is read when somebody wants it.

    Attributes:
        constants: the tensors that it names.
        packages: whose classes it may name.
    """

    text: str
    constants: list[Tensor]
    packages: Collection[str]

    def read(self) -> Graph:
        """The graph.

        Raises:
            TextError: the text is none.
        """
        return parse_graph(self.text, self.constants, self.packages)


def keep_graph(runner: ProgramRunner, graph: Graph | GraphText) -> None:
    """Keep the graph that a program was made of."""
    runner.__dict__[ATTRIBUTE] = graph


def graph_of(runner: ProgramRunner) -> Graph:
    """The graph that a program was made of.

    Raises:
        ValueError: the program was not made here, and nothing was captured.
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
