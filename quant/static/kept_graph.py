"""The captured graph of a converted module, kept beside its program for `compare` and `parity`: nothing runs by it."""

from __future__ import annotations

from quant.graph import Graph
from quant.runtime.program_runner import ProgramRunner

ATTRIBUTE = "_captured_graph"


def keep_graph(runner: ProgramRunner, graph: Graph) -> None:
    """Keep the graph that a program was made of."""
    runner.__dict__[ATTRIBUTE] = graph


def graph_of(runner: ProgramRunner) -> Graph:
    """The graph that a program was made of.

    Raises:
        ValueError: the program was not made here, and nothing was captured.
    """
    found = runner.__dict__.get(ATTRIBUTE)
    if not isinstance(found, Graph):
        raise ValueError(
            f"{runner.expected.path or type(runner.root).__name__}: its program has no captured graph beside it; "
            "convert the float model again to compare them"
        )
    return found
