"""Modules that the user puts into a converted model: which steps they are in, and how these are computed then.

A program refers to the modules that the model had when it was converted. Where a path leads to another one, the step
runs in float around the user's module and is rounded to its range again; a batch norm that was folded into a layer went
with it. What cannot be done so is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quant.graph import Graph, Kind, evaluate
from quant.kernels.reference_ops import OpTable
from quant.nn.base import QuantModule
from quant.runtime.callee import Submodule
from quant.runtime.instructions import FloatCall, Instruction, RecurrentCall
from quant.runtime.origin import Edge
from quant.runtime.trees import map_leaves
from quant.runtime.values import Held, Value
from quant.static.layers import StaticLayer


class GraphOrigin:
    """The modules that a program was built from.

    Attributes:
        layers: paths of modules that calls of the graph name; the others are around these.
        called: paths of those that are called in float, whatever module is there.
    """

    def __init__(self, root: nn.Module, graph: Graph, instructions: Iterable[Instruction]) -> None:
        self.root, self.graph = root, graph
        self.layers = {node.target for node in graph.nodes if node.kind is Kind.MODULE and node.target}
        callees = [one.callee for one in instructions if isinstance(one, FloatCall)]
        self.called = {one.path for one in callees if isinstance(one, Submodule)}
        self._known = {path: edge for path in _around(self.layers | _owners(graph)) if (edge := _edge(root, path))}
        self._edges: dict[tuple[str, ...], list[Edge]] = {}

    def edges(self, instruction: Instruction) -> list[Edge]:
        """The modules that an instruction was built from."""
        key = instruction.modules
        edges = self._edges.get(key)
        if edges is None:  # another thread may clear the rest meanwhile
            known, paths = self._known, _around(key) - self.called
            edges = self._edges[key] = [known[path] for path in sorted(paths) if path in known]
        return edges

    def edges_of(self, instructions: Iterable[Instruction]) -> list[Edge]:
        """The modules that some instructions were built from, each once."""
        return list({edge.path: edge for one in instructions for edge in self.edges(one)}.values())

    def changed(self, instruction: Instruction) -> list[Edge]:
        """Those of these in whose place is another module now, that is not as good: a copy of it is."""
        edges = self.edges(instruction)
        if all(edge.stands() for edge in edges):
            return []
        missing = self._missing(self._known.values())
        lost = {edge.path for edge in missing}
        # A copied block has copies inside, which are to be watched from now on.
        self._known = {
            path: edge if path in lost else _edge(self.root, path) or edge for path, edge in self._known.items()
        }
        self._edges.clear()
        return [edge for edge in self.edges(instruction) if edge.path in lost]

    def replaced(self) -> list[str]:
        """The paths of all places where another module is now, but for those that are called in float anyway."""
        return [edge.path for edge in self._missing(self._known.values()) if edge.path not in self.called]

    def _missing(self, edges: Collection[Edge]) -> list[Edge]:
        now = {edge.path: _edge(self.root, edge.path) for edge in edges}
        return [edge for edge in edges if (one := now[edge.path]) is None or not _serves(edge.module, one.module)]

    def run(
        self,
        instruction: Instruction,
        values: Sequence[Value],
        registers: dict[int, Any],
        ranges: dict[int, tuple[float, int]],
        table: OpTable,
    ) -> Any:
        """A step whose modules have changed, in float with those that are there now, then rounded to its range.

        Raises:
            RuntimeError: what was changed is no layer of its own in the program.
        """
        self._check(instruction)
        held, out = Held(), values[instruction.out]
        for one in instruction.reads:
            held.keep(values[one], registers[one])

        def real(index: int) -> Any:
            if index in held.reals:
                return held.reals[index]
            if index in held.integers:
                return map_leaves(lambda q: _dequantized(q, *ranges[index], table), held.integers[index])
            return evaluate(self.graph.nodes[index], self.root, real)

        result = evaluate(self.graph.nodes[out.node], self.root, real)
        if out.qparams is None:
            return result
        return map_leaves(lambda x: table["quantize"](x, *ranges[out.node]) if isinstance(x, Tensor) else x, result)

    def _check(self, instruction: Instruction) -> None:
        changed = [edge.path for edge in self.changed(instruction)]
        around = [path for path in changed if path not in self.layers]
        kept = [edge.path for edge in self.edges(instruction) if edge.path not in changed and _is_int8(edge.module)]
        rounded = isinstance(instruction, RecurrentCall) and instruction.integers
        if around or kept or rounded or instruction.own:
            why = (
                f"was computed together with {kept[0]!r}"
                if kept and not around
                else "is no single float layer of the program"
            )
            raise RuntimeError(
                f"layer {(around or changed)[0]!r}: it was replaced after quant.convert, and {why}; replace it in the "
                "float model and prepare that, or leave it float by the recipe and replace it then"
            )


def _edge(root: nn.Module, path: str) -> Edge | None:
    parent, _, name = path.rpartition(".")
    try:
        children: Any = root.get_submodule(parent)._modules
    except AttributeError:
        return None
    return Edge(children, name, children[name], path) if children.get(name) is not None else None


def _owners(graph: Graph) -> set[str]:
    return {node.owner for node in graph.nodes}


def _around(paths: Iterable[str]) -> set[str]:
    """These paths and those of all modules around them, but the root."""
    parts = [path.split(".") for path in paths if path]
    return {".".join(names[:end]) for names in parts for end in range(1, len(names) + 1)}


def _dequantized(q: Any, scale: float, zero_point: int, table: OpTable) -> Any:
    return table["dequantize"](q, scale, zero_point).contiguous() if isinstance(q, Tensor) else q


def _is_int8(module: nn.Module) -> bool:
    return isinstance(module, (StaticLayer, QuantModule))


def _serves(known: nn.Module, now: nn.Module) -> bool:
    """Whether a module is, or is a copy of, the one that a program was built from."""
    if now is known:
        return True
    if type(now) is not type(known) or ("forward" in vars(now)) != ("forward" in vars(known)):
        return False
    if _is_int8(known) or "forward" in vars(known):
        return True  # its numbers are its own; a module that was seen through has a forward of its own
    pairs = zip(known.parameters(), now.parameters(), strict=False)
    return str(known) == str(now) and all(torch.equal(one, other) for one, other in pairs)
