"""Which value of a torch.ao model's run is which value of the float model's graph.

Both are walked in the order of their calls. A layer is known by its name, a function by its name and by what it reads.
What torch.ao has fused or left out (a batch norm in a convolution, a ReLU, a dropout) gives the value that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from quant.graph import Graph, Kind, Node
from quant.migrate.recorded_run import Event, RecordedRun
from quant.runtime.arguments import bind
from quant.runtime.names import full_name
from quant.runtime.trees import Ref, leaves

IN_PLACE = {"iadd": "add", "radd": "add", "imul": "mul", "rmul": "mul", "isub": "sub"}
"""Python's names of operators on the left and on the right, by those of torch."""

KEEPS_RANGE = frozenset({
    "clamp", "clamp_max", "clamp_min", "contiguous", "dropout", "expand", "flatten", "getitem", "hardtanh", "permute",
    "relu", "relu6", "reshape", "select", "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view",
})  # fmt: skip
"""Functions whose result is the value that they read where the run has no call for them: fused, left out, or a move."""


class MatchedValues:
    """The values of one graph that a run has too.

    Attributes:
        values: node of the graph -> the run's values: one, or those of a tuple.
        events: node of the graph -> the run's call; none for calls that torch.ao fused or left out.
    """

    def __init__(self, graph: Graph, root: nn.Module, run: RecordedRun, theirs: Mapping[str, str]) -> None:
        """Walk the graph.

        Args:
            root: the module that the graph is of.
            theirs: the names of torch.ao's layers by those of the float model, where they differ.
        """
        self.values: dict[int, tuple[int, ...]] = {}
        self.events: dict[int, Event] = {}
        self._run, self._graph, self._theirs = run, graph, theirs
        self._left = list(run.events)
        self._enter(root)
        for node in graph.nodes:
            if node.kind is not Kind.INPUT and node.index not in self.values:
                self._match(node)

    def value(self, index: int) -> int | None:
        """The run's value of a node; None where it has none."""
        values = self.values.get(index, ())
        return values[0] if len(values) == 1 else None

    def computes(self, index: int) -> bool:
        """Whether the run has a call of its own for a node: not if it was fused or left out."""
        return index in self.events and self.events[index].computes

    def _enter(self, root: nn.Module) -> None:
        """Give the graph's inputs the values of the first call's arguments."""
        name = self._theirs.get(self._graph.path, self._graph.path)
        for args, kwargs in self._run.calls.get(name, [])[:1]:
            arguments = bind(root, args, kwargs)
            for key, tree in self._graph.arguments.items():
                for leaf, given in zip(leaves(tree), leaves(arguments[key]), strict=False):
                    if isinstance(leaf, Ref) and isinstance(given, Tensor):
                        self.values[leaf.index] = (self._run.value(given),)

    def _match(self, node: Node) -> None:
        reads = self._operands(node)
        event = self._module_call(node) if node.kind is Kind.MODULE else self._function_call(node, reads)
        if event is not None:
            self._left.remove(event)
            self.events[node.index] = event
            self.values[node.index] = event.outputs
            self._learn_operands(node, event)
        elif (item := self._item(node)) is not None:
            self.values[node.index] = (item,)
        elif len(reads) == 1 and node.meta is not None and _keeps_range(node):
            self.values[node.index] = reads

    def _operands(self, node: Node) -> tuple[int, ...]:
        return tuple(value for ref in node.refs for value in self.values.get(ref, ()))

    def _module_call(self, node: Node) -> Event | None:
        name = full_name(self._graph.path, node.target)
        name = self._theirs.get(name, name)
        return next((one for one in self._left if one.is_module and one.name == name), None)

    def _function_call(self, node: Node, reads: tuple[int, ...]) -> Event | None:
        """The first call that reads the same: of the same function, or of any where it joins several values."""
        if not reads or node.kind is Kind.GUARD:
            return None
        same = [one for one in self._left if not one.is_module and one.inputs == reads]
        own = _function_name(node.target)
        named = (one for one in same if _function_name(one.name) in (own, f"{own}_relu"))
        joining = same if len(set(reads)) > 1 else []
        return next(named, next(iter(joining), None))

    def _learn_operands(self, node: Node, event: Event) -> None:
        """Take the values that a matched call reads for those whose makers have no match."""
        if len(node.refs) == len(event.inputs):
            for ref, value in zip(node.refs, event.inputs, strict=True):
                self.values.setdefault(ref, (value,))

    def _item(self, node: Node) -> int | None:
        """The item that a node takes out of a tuple of values."""
        if len(node.refs) != 1 or len(node.args) != 2 or type(node.args[1]) is not int:
            return None
        values = self.values.get(node.refs[0], ())
        return values[node.args[1]] if -len(values) <= node.args[1] < len(values) else None


def _keeps_range(node: Node) -> bool:
    return node.kind is Kind.MODULE or _function_name(node.target) in KEEPS_RANGE


def _function_name(target: Any) -> str:
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    bare: str = name.strip("_")
    return IN_PLACE.get(bare, bare)
