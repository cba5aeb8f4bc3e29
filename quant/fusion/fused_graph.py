"""A graph read as steps: which calls are computed together, which values are uint8, and which of them share a range.

The fused graph is what prepare observes, what training simulates and what convert builds, so that the three cannot
disagree. Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quant.folding import norm_arguments, origin
from quant.fusion.float_values import wanted_as_reals
from quant.graph import Graph, Kind
from quant.ops.operator import Recurrent, Weighted
from quant.ops.recurrent import Cell
from quant.ops.step import Step
from quant.recipe import QConfig
from quant.runtime.trees import Attr

RULES = 6
"""Version of the decisions about float values, shared ranges and biases. A saved model is fused by the rules it was
converted by: 1 kept sums in integers that float steps read too, and gave all inputs of a concatenation its range; 2
rounded what the caller or a float step reads wherever integer steps read it too, had one table for each of several
functions in a row, kept a step for an nn.Identity, and corrected the biases of layers that have none; 3 had a table,
and a range, for sums with 0 and products with 1; 4 rounded infinities that a forward puts into a layer's input; 5 left
layers with 16-bit activations float."""


@dataclass
class Slot:
    """One range, and the values that share it: the same numbers in other shapes, orders or places.

    Attributes:
        name: the observer's name.
        values: the values that share the range.
        observed: the values shown to the observer; the others hold the same numbers, or the recurrent layer shows them.
        qconfig: chooses the observer.
        inner: the ranges inside recurrent layers that are this one, as (path, name).
        two_bytes: whether a layer with 16-bit activations reads it.
    """

    name: str
    values: list[int]
    observed: list[int]
    qconfig: QConfig
    inner: list[tuple[str, str]] = field(default_factory=list)
    two_bytes: bool = False


@dataclass
class FusedGraph:
    """A graph read as steps.

    Attributes:
        graph: the captured graph.
        steps: every node belongs to exactly one.
        slots: ranges by name.
        slot_of: the slot of each value that some integer step reads; such values are uint8 after conversion.
        inner: the slot of each range inside a recurrent layer, by the layer's path and the range's name.
        floats: layers and steps that stay float whatever the recipe says, and why; as given to `fuse`.
        shared: layers that other captured modules call too (`shared.py`).
        joined: for each concatenation with an input whose range is not its own: its slot and the input's.
        rules: as given to `fuse`.
        as_reals: outputs of weighted steps and matrix products that float steps or the caller read as well.
    """

    graph: Graph
    steps: list[Step]
    slots: dict[str, Slot]
    slot_of: dict[int, str]
    inner: dict[tuple[str, str], str] = field(default_factory=dict)
    floats: Mapping[str, str] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    joined: tuple[tuple[str, str], ...] = ()
    rules: int = RULES
    as_reals: frozenset[int] = frozenset()

    @property
    def ranked(self) -> bool:
        """Whether the steps are right for inputs of the captured numbers of dimensions alone."""
        return any(step.integer and step.operator.needs_rank for step in self.steps)

    def calls_of_layer(self, step: Step) -> list[Step]:
        """The steps that share a weighted step's int8 weight, itself included: all calls of its layer."""
        weight = step.weighted.weight
        if not isinstance(weight, Attr):
            return [step]
        weighted = (other for other in self.steps if isinstance(other.operator, Weighted))
        same = [one for one in weighted if isinstance(one.weighted.weight, Attr) and one.weighted.weight == weight]
        if len(same) == 1:
            return same
        layer = self.layer_of(step)
        return [one for one in same if self.layer_of(one) == layer]

    def layer_of(self, step: Step) -> Hashable:
        """The int8 layer of a weighted step, the same for all its calls in all programs of a module.

        A module is one, by its name. So are calls of a function with the same parameter as weight, the same bias,
        settings and operations folded in; a call whose weight is computed is one by itself.
        """
        node, layer = self.graph.nodes[step.nodes[0]], step.weighted
        if node.kind is Kind.MODULE:
            return str(node.target)
        if not isinstance(layer.weight, Attr):
            return step
        numbers = origin((layer.bias, layer.affine, self._norm_of(layer)), self.graph)
        return layer.weight.path, type(layer), repr(layer.int8()), numbers, repr(step.qconfig)

    def _norm_of(self, layer: Weighted) -> tuple[Any, ...]:
        """The batch norm that is folded into a layer: a module's name, or what a call of F.batch_norm is given."""
        if layer.batch_norm is None:
            return ()
        node = self.graph.nodes[layer.batch_norm]
        if node.kind is Kind.MODULE:
            return (node.target,)
        return node.owner, node.frozen, {**norm_arguments(node), "input": None}

    def slots_of_other_calls(self) -> dict[str, set[str]]:
        """For each slot that a layer is called with: the slots that the same layer is called with elsewhere."""
        others: dict[str, set[str]] = {}
        for step in self.steps:
            if isinstance(step.operator, Weighted) and step.integer:
                slots = {self.slot_of[call.inputs[0]] for call in self.calls_of_layer(step)}
                own = self.slot_of[step.inputs[0]]
                others.setdefault(own, set()).update(slots - {own})
        return others

    def emits_integers(self, step: Step) -> bool:
        """Whether the step's output is uint8. An integer step that only float steps read gives float32 directly.

        So do the steps of `as_reals`, and cells: the user's loop carries their state as a float, and it is quantised
        for its other readers.
        """
        emits = step.integer and step.output in self.slot_of and step.output not in self.as_reals
        return emits and not isinstance(step.operator, Cell)

    def read_both_ways(self) -> set[int]:
        """Float values that integer steps read rounded, and float steps, cells as a state, or the caller unrounded."""
        steps = {index: step for step in self.steps for index in step.nodes}
        wanted = wanted_as_reals(self.steps, self.graph.users())
        recurrent = (step for step in self.steps if isinstance(step.operator, Recurrent))
        wanted.update(one for step in recurrent for one in step.inputs if self._is_state_too(one, step))
        return {value for value in self.slot_of if value in wanted and not self.emits_integers(steps[value])}

    def _is_state_too(self, value: int, step: Step) -> bool:
        """Whether a recurrent step has its input as a state as well, as in `h = cell(h, h)`."""
        return self.graph.nodes[step.nodes[0]].refs.count(value) > 1

    def inner_slots(self, step: Step) -> dict[str, str]:
        """The slots of the ranges inside a recurrent step, by the range's name."""
        assert isinstance(step.operator, Recurrent)
        path = self.graph.nodes[step.nodes[0]].target
        return {name: self.inner[path, name] for name in step.operator.ranges}

    def slot_like(self, other: Slot) -> str:
        """The slot that holds the values of `other`, a slot of another fusion of the same graph."""
        # The last value: a concatenation may have one range for inputs that had their own.
        return self.slot_of[other.values[-1]] if other.values else self.inner[other.inner[0]]
