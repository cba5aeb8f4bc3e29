"""the modules that a program was converted from, and whether they are still in their places."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from quant.runtime.callee import Submodule
from quant.runtime.instructions import FloatCall, Instruction
from quant.runtime.names import submodule


class Edge(NamedTuple):
    """That `children` had `module` under `name`; `path` leads there."""

    children: dict[str, nn.Module | None]
    name: str
    module: nn.Module
    path: str

    def stands(self) -> bool:
        """Whether it still has."""
        return self.children.get(self.name) is self.module


class Origin:
    """The modules that a program was made of.

    Args:
        instructions: of the program, which name them.
        floats: the float calls that its steps of integers stand for.
        int8: paths of those that are int8 layers, in which only their class is compared with another module's.

    Attributes:
        layers: paths of modules that are called; the others are around these.
        called: paths of those that are called in float, whatever module is there.
    """

    def __init__(
        self,
        root: nn.Module,
        instructions: Collection[Instruction],
        floats: Collection[Instruction],
        int8: Collection[str],
    ) -> None:
        self.root, self.int8 = root, frozenset(int8)
        self.called = _modules_called(instructions)
        self.layers = self.called | _modules_called(floats)
        named = {path for one in instructions for path in one.modules}
        self._known = {path: edge for path in _around(self.layers | named) if (edge := _edge(root, path))}
        self._edges: dict[tuple[str, ...], list[Edge]] = {}

    def edges(self, instruction: Instruction) -> list[Edge]:
        """The modules that an instruction was converted from."""
        return self._edges_at(instruction.modules)

    def _edges_at(self, modules: tuple[str, ...]) -> list[Edge]:
        edges = self._edges.get(modules)
        if edges is None:  # another thread may clear the rest meanwhile
            known, paths = self._known, _around(modules) - self.called
            edges = self._edges[modules] = [known[path] for path in sorted(paths) if path in known]
        return edges

    def standing(self, instructions: Sequence[Instruction]) -> list[Edge] | None:
        """The modules that some instructions were converted from, each once; None where one of them has changed."""
        edges = self._edges_of(instructions)
        if all(edge.stands() for edge in edges):
            return edges
        return None if any(map(self.changed, instructions)) else self._edges_of(instructions)

    def _edges_of(self, instructions: Sequence[Instruction]) -> list[Edge]:
        places = dict.fromkeys(one.modules for one in instructions)  # many are of one layer
        return list({edge.path: edge for modules in places for edge in self._edges_at(modules)}.values())

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
        return [edge for edge in edges if (one := now[edge.path]) is None or not self._serves(edge, one.module)]

    def _serves(self, known: Edge, now: nn.Module) -> bool:
        """Whether a module is, or is a copy of, the one that a program was made of."""
        before = known.module
        if now is before:
            return True
        if type(now) is not type(before) or ("forward" in vars(now)) != ("forward" in vars(before)):
            return False
        if known.path in self.int8 or "forward" in vars(before):
            return True  # its numbers are its own; a module that was seen through has a forward of its own
        pairs = zip(before.parameters(), now.parameters(), strict=False)
        return str(before) == str(now) and all(torch.equal(one, other) for one, other in pairs)


def _edge(root: nn.Module, path: str) -> Edge | None:
    parent, _, name = path.rpartition(".")
    try:
        children: Any = submodule(root, parent)._modules
    except AttributeError:
        return None
    return Edge(children, name, children[name], path) if children.get(name) is not None else None


def _modules_called(instructions: Collection[Instruction]) -> set[str]:
    """The paths of the modules that instructions call as they are."""
    callees = [one.callee for one in instructions if isinstance(one, FloatCall)]
    return {one.path for one in callees if isinstance(one, Submodule) and one.path}


def _around(paths: Iterable[str]) -> set[str]:
    """These paths, and those of all modules that contain them, except the root."""
    around = set[str]()
    for path in paths:
        while path and path not in around:
            around.add(path)
            path = path.rpartition(".")[0]
    return around
