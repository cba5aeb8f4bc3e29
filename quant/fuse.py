"""From a captured graph to a plan: which calls become one integer step, which values are uint8, which share a range.

The plan is what prepare observes, what training simulates and what convert builds, so that the three cannot disagree.
Nothing here computes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from quant.graph import Graph, Node, Ref, attribute
from quant.names import full_name
from quant.recipe import QConfig, Recipe
from quant.static.meaning import Meaning, StaysFloat, reads_only_shape
from quant.static.recognise import OPERATORS, recognise

FLOAT, SHAPE = "float", "shape"


@dataclass
class Step:
    """One or more captured calls that are computed together.

    Attributes:
        op: an entry of `recognise.OPERATORS`; "float" for the user's own arithmetic, "shape" for what reads no values.
        nodes: indices of the calls, in order; the value of the last is the step's.
        inputs: the values it reads as activations.
        attrs: settings, as `recognise` gives them, and `batch_norm`: the node that was folded in, `clamp`: (low, high).
            Of a recurrent layer `ranges`: the names of the ranges inside of it, each a slot's by `Plan.inner`.
        name: for people, and of its observer.
        reason: why it is float.
        qconfig: of a weighted step.
    """

    op: str
    nodes: tuple[int, ...]
    inputs: tuple[int, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    reason: str = ""
    qconfig: QConfig | None = None

    @property
    def output(self) -> int:
        """The value it gives."""
        return self.nodes[-1]

    @property
    def integer(self) -> bool:
        """Whether it computes in integers."""
        return self.op not in (FLOAT, SHAPE)


@dataclass
class Slot:
    """One range, shared by all values that are the same numbers moved about.

    Attributes:
        name: of its observer.
        values: that have the range.
        observed: those to look at; the others hold the same numbers, or are shown by the recurrent layer itself.
        qconfig: says which observer.
        fixed: the range, where the function that makes the values decides it.
        inner: the ranges inside of recurrent layers that it is, as (path, name).
    """

    name: str
    values: list[int]
    observed: list[int]
    qconfig: QConfig
    fixed: tuple[float, float] | None = None
    inner: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Plan:
    """A graph read as steps.

    Attributes:
        graph: what was captured.
        steps: every node is in exactly one.
        slots: ranges by name.
        slot_of: the slot of each value that some integer step reads; such values are uint8 after conversion.
        inner: the slot of each range inside of a recurrent layer, by the layer's path and the range's name.
        floats: layers that stay float whatever the recipe says, and why; as given to `make_plan`.
        shared: layers that other captured units call too (`shared.py`).
    """

    graph: Graph
    steps: list[Step]
    slots: dict[str, Slot]
    slot_of: dict[int, str]
    inner: dict[tuple[str, str], str] = field(default_factory=dict)
    floats: Mapping[str, str] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()

    def twins(self, step: Step) -> list[Step]:
        """The steps that share one int8 weight with a weighted step, itself included: calls of the same module."""
        first = self.graph.nodes[step.nodes[0]]
        if first.kind != "module":
            return [step]

        def same(other: Step) -> bool:
            node = self.graph.nodes[other.nodes[0]]
            return node.kind == "module" and node.target == first.target and other.integer

        return [other for other in self.steps if same(other)]

    def emits_integers(self, step: Step) -> bool:
        """Whether the step's value is uint8; an integer step that only float ones read gives float32 directly.

        A cell's state goes round in the user's loop as a float, and is quantised for whoever else reads it.
        """
        return step.integer and step.output in self.slot_of and step.op != "cell"

    def read_both_ways(self) -> set[int]:
        """Values made in float that integer steps read rounded, and float steps or the caller as they are."""
        steps = {index: step for step in self.steps for index in step.nodes}
        users, end = self.graph.users(), len(self.graph.nodes)

        def as_it_is(value: int, user: int) -> bool:
            return user == end or (steps[user].op != SHAPE and value not in steps[user].inputs)

        return {value for value in self.slot_of
                if not steps[value].integer and any(as_it_is(value, user) for user in users[value])}  # fmt: skip

    def inner_slots(self, step: Step) -> dict[str, str]:
        """Of a recurrent step: the slot of each range inside of it, by the range's name."""
        path = self.graph.nodes[step.nodes[0]].target
        return {name: self.inner[path, name] for name in step.attrs["ranges"]}

    def slot_like(self, other: Slot) -> str:
        """The slot that holds the values of another plan's slot, of the same graph."""
        return self.slot_of[other.values[0]] if other.values else self.inner[other.inner[0]]


def make_plan(graph: Graph, root: nn.Module, recipe: Recipe, floats: Mapping[str, str] | None = None) -> Plan:
    """Read a captured graph.

    Args:
        root: the captured module.
        recipe: decides on weighted layers by their full names; what stands between them follows.
        floats: layers that stay float whatever the recipe says, by their names within root, and why.
    """
    users = graph.users()
    steps = _fuse(_take_outputs(_steps(graph, root, recipe, floats or {}), graph), graph, root, users)
    _choose_domains(steps, graph, users)
    plan = _share_ranges(steps, graph, recipe)
    plan.floats = dict(floats or {})
    return plan


def _steps(graph: Graph, root: nn.Module, recipe: Recipe, floats: Mapping[str, str]) -> list[Step]:
    steps = []
    for node in graph.nodes:
        if node.kind in ("input", "guard") or reads_only_shape(node):
            steps.append(Step(SHAPE, (node.index,), name=node.label))
            continue
        try:
            meaning = recognise(node, graph, root)
            qconfig = _qconfig(node, meaning, graph, root, recipe, floats)
            steps.append(Step(meaning.op, (node.index,), meaning.inputs, meaning.attrs, node.label, qconfig=qconfig))
        except StaysFloat as reason:
            steps.append(Step(FLOAT, (node.index,), name=node.label, reason=str(reason)))
    return steps


def _qconfig(
    node: Node, meaning: Meaning, graph: Graph, root: nn.Module, recipe: Recipe, floats: Mapping[str, str]
) -> QConfig | None:
    if not OPERATORS[meaning.op].anchor:
        return None
    name = node.target if node.kind == "module" else node.owner
    if name in floats:
        raise StaysFloat(floats[name])
    qconfig, index = recipe.resolve(full_name(graph.path, name), attribute(root, name))
    if qconfig is None:
        raise StaysFloat("the recipe says so" if index >= 0 else "the recipe's default is float")
    if qconfig.activation_bits == 16:
        raise StaysFloat("activation_bits=16 has no static kernel")
    return qconfig


def _take_outputs(steps: list[Step], graph: Graph) -> list[Step]:
    """Make the output sequence, the first of what a recurrent layer gives, the value of its step; states stay float."""
    first = {
        node.args[0].index: node.index
        for node in graph.nodes
        if node.target is operator.getitem and isinstance(node.args[0], Ref) and node.args[1] == 0 and node.meta
    }
    taken: set[int] = set()
    for step in steps:
        if step.op == "sequence" and step.output in first:
            step.nodes = (*step.nodes, first[step.output])
            taken.add(step.output)
    kept = [step for step in steps if len(step.nodes) > 1 or step.output not in taken]
    return sorted(kept, key=lambda step: step.output)


def _fuse(steps: list[Step], graph: Graph, root: nn.Module, users: dict[int, list[int]]) -> list[Step]:
    """Fold batch norms and clamps into the step before, where nothing else reads the value between them."""
    by_output = {step.output: step for step in steps}
    gone: set[int] = set()
    for step in steps:
        if step.op != "lookup" or users[step.inputs[0]] != [step.nodes[0]]:
            continue
        before = by_output[step.inputs[0]]
        if step.attrs.get("is_batch_norm") and _takes_batch_norm(before, step, graph, root):
            before.attrs["batch_norm"] = step.nodes[0]
        elif step.attrs.get("clamp") and _takes_clamp(before, step):
            before.attrs["clamp"] = step.attrs["clamp"]
        else:
            continue
        before.nodes = (*before.nodes, *step.nodes)
        by_output[before.output] = before
        gone.add(id(step))
    kept = [step for step in steps if id(step) not in gone]
    return sorted(kept, key=lambda step: step.output)


def _takes_batch_norm(before: Step, step: Step, graph: Graph, root: nn.Module) -> bool:
    if not (before.integer and OPERATORS[before.op].weighted) or len(before.nodes) > 1:
        return False
    if _is_called_again(graph.nodes[before.nodes[0]], graph, root):  # the other call would need a weight of its own
        return False
    meta = graph.nodes[before.output].meta
    module: Any = attribute(root, graph.nodes[step.nodes[0]].target)
    return meta is not None and (before.op != "linear" or len(meta.shape) == 2) and meta.shape[1] == module.num_features


def _is_called_again(node: Node, graph: Graph, root: nn.Module) -> bool:
    """Whether the module that `node` calls is called by another node too, under this name or another."""
    if node.kind != "module":
        return False
    module = attribute(root, node.target)
    calls = [one for one in graph.nodes if one.kind == "module" and attribute(root, one.target) is module]
    return len(calls) > 1


def _takes_clamp(before: Step, step: Step) -> bool:
    low, high = step.attrs["clamp"]
    clampable = before.op in ("add", "mul") or (before.integer and OPERATORS[before.op].weighted)
    return clampable and before.attrs.get("clamp") is None and low <= 0.0 <= high


def _choose_domains(steps: list[Step], graph: Graph, users: dict[int, list[int]]) -> None:
    """Integers between integers: what has no integer neighbour on both sides stays, or becomes, float."""
    by_node = {index: step for step in steps for index in step.nodes}

    def demote(step: Step, reason: str) -> None:
        step.op, step.reason, step.inputs = FLOAT, reason, ()

    for step in steps:
        if not step.integer or OPERATORS[step.op].anchor:
            continue
        if not any(by_node[value].integer for value in step.inputs):
            demote(step, "what it reads is float")
    for step in reversed(steps):
        if not step.integer or OPERATORS[step.op].anchor:
            continue
        readers = [by_node[user] for user in users[step.output] if user < len(graph.nodes)]
        # A cell is an integer step, and yet reads its state as a float.
        if not any(reader.integer and step.output in reader.inputs for reader in readers):
            demote(step, "what reads it is float")
    for step in steps:
        if step.op == "pass" and _part_of_float(step, graph, by_node):
            demote(step, "what it reads is float")


def _part_of_float(step: Step, graph: Graph, by_node: dict[int, Step]) -> bool:
    """A part of a tuple that a float step made: there is no one tensor to quantise before it."""
    return graph.nodes[step.inputs[0]].meta is None and not by_node[step.inputs[0]].integer


def _share_ranges(steps: list[Step], graph: Graph, recipe: Recipe) -> Plan:
    read = {value for step in steps if step.integer for value in step.inputs}
    inside = _inner_ranges(steps, graph)
    parent = {value: value for value in [*read, *inside]}

    def find(value: int) -> int:
        while parent[value] != value:
            value = parent[value]
        return value

    def join(value: int, other: int) -> None:
        one, two = sorted((find(value), find(other)))
        parent[two] = one

    inside_of = {key: value for value, key in inside.items()}
    for step in steps:
        if step.integer and OPERATORS[step.op].shares and step.output in read:
            for value in step.inputs:
                join(value, step.output)
    modules: dict[str, int] = {}
    for step in steps:
        if is_recurrent(step):
            # One int8 layer, wherever it is called from: one range of its input, one of each layer's states.
            path = graph.nodes[step.nodes[0]].target
            join(modules.setdefault(path, step.inputs[0]), step.inputs[0])
            if step.op == "sequence" and step.output in read:
                join(inside_of[path, step.attrs["ranges"][-1]], step.output)
    makers = {step.output: step for step in steps}
    groups: dict[int, list[int]] = {}
    for value in sorted(parent):
        groups.setdefault(find(value), []).append(value)
    slots: dict[str, Slot] = {}
    slot_of: dict[int, str] = {}
    inner: dict[tuple[str, str], str] = {}
    for group in groups.values():
        keys = [inside[value] for value in group if value < 0]
        slot = _slot([value for value in group if value >= 0], keys, steps, makers, graph, recipe)
        slots[slot.name] = slot
        slot_of.update(dict.fromkeys(slot.values, slot.name))
        inner.update(dict.fromkeys(keys, slot.name))
    return Plan(graph, steps, slots, slot_of, inner)


def _inner_ranges(steps: list[Step], graph: Graph) -> dict[int, tuple[str, str]]:
    """The ranges inside of recurrent layers, (path, name), numbered below zero where values are numbered above."""
    found: dict[tuple[str, str], int] = {}
    for step in steps:
        if is_recurrent(step):
            for name in step.attrs["ranges"]:
                found.setdefault((graph.nodes[step.nodes[0]].target, name), -1 - len(found))
    return {number: key for key, number in found.items()}


def _slot(
    values: list[int],
    inner: list[tuple[str, str]],
    steps: list[Step],
    makers: dict[int, Step],
    graph: Graph,
    recipe: Recipe,
) -> Slot:
    def shown(value: int) -> bool:
        maker = makers[value]
        return not maker.integer or not (OPERATORS[maker.op].shares or maker.op == "sequence")

    observed = [value for value in values if shown(value)]
    fixed = {makers[value].attrs.get("fixed") for value in observed if makers[value].integer}
    known = next(iter(fixed)) if len(fixed) == 1 and all(makers[value].integer for value in observed) else None
    if inner:
        known = None
    paths = {path for path, _ in inner}
    configs = [step.qconfig for step in steps if step.integer and graph.nodes[step.nodes[0]].target in paths]
    configs += [makers[value].qconfig for value in observed]
    readers = [step for step in steps if step.integer and set(step.inputs) & set(values)]
    configs += [step.qconfig.for_inputs() for step in readers if step.qconfig is not None]
    qconfig = next((config for config in configs if config is not None), recipe.default or QConfig())
    name = full_name(*inner[-1]) if inner else makers[observed[0]].name
    return Slot(name, values, observed, qconfig, known, inner)


def is_recurrent(step: Step) -> bool:
    """Whether the step is an int8 layer with states."""
    return step.integer and OPERATORS[step.op].recurrent
