"""Modules that the user replaces in a converted model: which steps they affect, and how these steps then run.

A program refers to the modules that the model had when it was converted. Where a path leads to another module now, its
step runs in float with that module and is rounded to its range; a batch norm that was folded into the old layer is gone
with it. A step that cannot run so is an error. The float calls of all integer steps are a program of their own,
`floats`, of which single values are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels.reference_ops import OpTable
from quant.runtime.callee import Submodule
from quant.runtime.instructions import FloatCall, Guard, Instruction, RecurrentCall
from quant.runtime.matching import check_guard
from quant.runtime.names import attribute, submodule
from quant.runtime.origin import Edge
from quant.runtime.program import Program
from quant.runtime.single_steps import call
from quant.runtime.trees import Attr, Ref, map_leaves, settle
from quant.runtime.values import Held, Value


class ProgramOrigin:
    """The modules that a program was converted from.

    Args:
        root: the captured module.
        program: its program, whose instructions name the modules.
        floats: the float calls that the program's integer steps stand for, as a program over values of the same graph.
        int8: paths of int8 layers; of these, only the class is compared with a replacement's.

    Attributes:
        layers: paths of modules that are called; the other known modules contain these.
        called: paths of modules that are called in float, so that any replacement is called.
    """

    def __init__(self, root: nn.Module, program: Program, floats: Program, int8: Collection[str]) -> None:
        self.root, self.floats, self.int8 = root, floats, frozenset(int8)
        self.called = _modules_called(program)
        self.layers = self.called | _modules_called(floats)
        named = {path for one in program.instructions for path in one.modules}
        self._known = {path: edge for path in _around(self.layers | named) if (edge := _edge(root, path))}
        self._edges: dict[tuple[str, ...], list[Edge]] = {}
        self._calls = {floats.values[one.out].node: one for one in floats.instructions}

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
        """The modules of an instruction that were replaced by another module, other than a copy."""
        edges = self.edges(instruction)
        if all(edge.stands() for edge in edges):
            return []
        missing = self._missing(self._known.values())
        lost = {edge.path for edge in missing}
        # A copied block contains copies, which are the known modules from now on.
        self._known = {
            path: edge if path in lost else _edge(self.root, path) or edge for path, edge in self._known.items()
        }
        self._edges.clear()
        return [edge for edge in self.edges(instruction) if edge.path in lost]

    def replaced(self) -> list[str]:
        """The paths of all replaced modules, except those that are called in float."""
        return [edge.path for edge in self._missing(self._known.values()) if edge.path not in self.called]

    def _missing(self, edges: Collection[Edge]) -> list[Edge]:
        now = {edge.path: _edge(self.root, edge.path) for edge in edges}
        return [edge for edge in edges if (one := now[edge.path]) is None or not self._serves(edge, one.module)]

    def run(
        self,
        instruction: Instruction,
        values: Sequence[Value],
        registers: dict[int, Any],
        ranges: dict[int, tuple[float, int]],
        table: OpTable,
    ) -> Any:
        """Run a step whose modules were replaced: in float with the new modules, then rounded to its range.

        Raises:
            RuntimeError: the replaced module is not a layer of its own in the program.
        """
        self._check(instruction)
        held, out = Held(), values[instruction.out]
        for one in instruction.reads:
            held.keep(values[one], registers[one])

        def real(node: int) -> Any:
            if node in held.reals:
                return held.reals[node]
            if node in held.integers:
                return map_leaves(lambda q: _dequantized(q, *ranges[node], table), held.integers[node])
            return self._computed(node, real)

        result = self._computed(out.node, real)
        if out.qparams is None:
            return result
        return map_leaves(lambda x: table["quantize"](x, *ranges[out.node]) if isinstance(x, Tensor) else x, result)

    def _computed(self, node: int, real: Callable[[int], Any]) -> Any:
        """The float value of a node; `real` returns those that its call reads."""
        own, values = self._calls[node], self.floats.values

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return real(values[leaf.index].node)
            return attribute(self.root, leaf.path) if isinstance(leaf, Attr) else leaf

        args, kwargs = map_leaves(filled, own.arguments)
        if isinstance(own, Guard):
            return check_guard(args[0], args[1], own.owner, self.root, node)
        assert isinstance(own, FloatCall)
        if isinstance(own.callee, Submodule):
            args, kwargs = settle(args, {}), settle(kwargs, {})
        return call(own, self.root, args, kwargs)

    def _serves(self, known: Edge, now: nn.Module) -> bool:
        """Whether a module is the known one, or a copy of it."""
        before = known.module
        if now is before:
            return True
        if type(now) is not type(before) or ("forward" in vars(now)) != ("forward" in vars(before)):
            return False
        if known.path in self.int8 or "forward" in vars(before):
            return True  # an int8 layer has its own numbers; a part has its own program
        pairs = zip(before.parameters(), now.parameters(), strict=False)
        return str(before) == str(now) and all(torch.equal(one, other) for one, other in pairs)

    def _check(self, instruction: Instruction) -> None:
        changed = [edge.path for edge in self.changed(instruction)]
        around = [path for path in changed if path not in self.layers]
        kept = [edge.path for edge in self.edges(instruction) if edge.path not in changed and edge.path in self.int8]
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
        children: Any = submodule(root, parent)._modules
    except AttributeError:
        return None
    return Edge(children, name, children[name], path) if children.get(name) is not None else None


def _modules_called(program: Program) -> set[str]:
    """The paths of the float modules that a program calls."""
    callees = [one.callee for one in program.instructions if isinstance(one, FloatCall)]
    return {one.path for one in callees if isinstance(one, Submodule) and one.path}


def _around(paths: Iterable[str]) -> set[str]:
    """These paths, and those of all modules that contain them, except the root."""
    around = set[str]()
    for path in paths:
        while path and path not in around:
            around.add(path)
            path = path.rpartition(".")[0]
    return around


def _dequantized(q: Any, scale: float, zero_point: int, table: OpTable) -> Any:
    return table["dequantize"](q, scale, zero_point).contiguous() if isinstance(q, Tensor) else q
