"""From a captured graph to a plan: which calls become one integer step, which values are uint8, which share a range.

The plan is what prepare observes, what training simulates and what convert builds, so that the three cannot disagree.
Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from quant.graph import Graph, Node, Ref, attribute, leaves
from quant.recipe import QConfig, Recipe
from quant.static.recognise import OPERATORS, Meaning, StaysFloat, reads_only_shape, recognise, what_name

FLOAT, SHAPE = "float", "shape"


@dataclass
class Step:
    """One or more captured calls that are computed together.

    Attributes:
        op: an entry of `recognise.OPERATORS`; "float" for the user's own arithmetic, "shape" for what reads no values.
        nodes: indices of the calls, in order; the value of the last is the step's.
        inputs: the values it reads as activations.
        attrs: settings, as `recognise` gives them, and `batch_norm`: the node that was folded in, `clamp`: (low, high).
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
        observed: those to look at; the others hold the same numbers.
        qconfig: says which observer.
        fixed: the range, where the function that makes the values decides it.
    """

    name: str
    values: list[int]
    observed: list[int]
    qconfig: QConfig
    fixed: tuple[float, float] | None = None


@dataclass
class Plan:
    """A graph read as steps.

    Attributes:
        graph: what was captured.
        steps: every node is in exactly one.
        slots: ranges by name.
        slot_of: the slot of each value that some integer step reads; such values are uint8 after conversion.
    """

    graph: Graph
    steps: list[Step]
    slots: dict[str, Slot]
    slot_of: dict[int, str]

    def twins(self, step: Step) -> list[Step]:
        """The steps that share one int8 weight with a weighted step, itself included: calls of the same module."""
        first = self.graph.nodes[step.nodes[0]]
        if first.kind != "module":
            return [step]

        def same(other: Step) -> bool:
            node = self.graph.nodes[other.nodes[0]]
            module = node.kind == "module" and node.target == first.target
            return module and other.integer and other.attrs.get("batch_norm") == step.attrs.get("batch_norm")

        return [other for other in self.steps if same(other)]

    def emits_integers(self, step: Step) -> bool:
        """Whether the step's value is uint8; an integer step that only float ones read gives float32 directly."""
        return step.integer and step.output in self.slot_of


def make_plan(graph: Graph, root: nn.Module, recipe: Recipe, floats: Mapping[str, str] | None = None) -> Plan:
    """Read a captured graph.

    Args:
        root: the captured module.
        recipe: decides on weighted layers by their full names; what stands between them follows.
        floats: layers that stay float whatever the recipe says, by their names within root, and why.
    """
    users = graph.users()
    steps = _fuse(_steps(graph, root, recipe, floats or {}), graph, root, users)
    _choose_domains(steps, graph, users)
    slot_of, slots = _share_ranges(steps, graph, recipe)
    return Plan(graph, steps, slots, slot_of)


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
    full_name = ".".join(part for part in (graph.path, name) if part)
    qconfig, index = recipe.resolve(full_name, attribute(root, name))
    if qconfig is None:
        raise StaysFloat("the recipe says so" if index >= 0 else "the recipe's default is float")
    if qconfig.activation_bits == 16:
        raise StaysFloat("activation_bits=16 has no static kernel")
    return qconfig


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
    meta = graph.nodes[before.output].meta
    module: Any = attribute(root, graph.nodes[step.nodes[0]].target)
    return meta is not None and (before.op != "linear" or len(meta.shape) == 2) and meta.shape[1] == module.num_features


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
        if not any(reader.integer for reader in readers):
            demote(step, "what reads it is float")
    for step in steps:
        if step.op == "pass" and _part_of_float(step, graph, by_node):
            demote(step, "what it reads is float")


def _part_of_float(step: Step, graph: Graph, by_node: dict[int, Step]) -> bool:
    """A part of a tuple that a float step made: there is no one tensor to quantise before it."""
    return graph.nodes[step.inputs[0]].meta is None and not by_node[step.inputs[0]].integer


def _share_ranges(steps: list[Step], graph: Graph, recipe: Recipe) -> tuple[dict[int, str], dict[str, Slot]]:
    read = {value for step in steps if step.integer for value in step.inputs}
    parent = {value: value for value in read}

    def find(value: int) -> int:
        while parent[value] != value:
            value = parent[value]
        return value

    for step in steps:
        if step.integer and OPERATORS[step.op].shares and step.output in read:
            for value in step.inputs:
                one, other = sorted((find(value), find(step.output)))
                parent[other] = one
    makers = {step.output: step for step in steps}
    groups: dict[int, list[int]] = {}
    for value in sorted(read):
        groups.setdefault(find(value), []).append(value)
    slots: dict[str, Slot] = {}
    slot_of: dict[int, str] = {}
    for values in groups.values():
        slot = _slot(values, steps, makers, graph, recipe)
        slots[slot.name] = slot
        slot_of.update(dict.fromkeys(values, slot.name))
    return slot_of, slots


def _slot(values: list[int], steps: list[Step], makers: dict[int, Step], graph: Graph, recipe: Recipe) -> Slot:
    def moved(value: int) -> bool:
        maker = makers[value]
        return maker.integer and OPERATORS[maker.op].shares

    observed = [value for value in values if not moved(value)]
    fixed = {makers[value].attrs.get("fixed") for value in observed if makers[value].integer}
    known = next(iter(fixed)) if len(fixed) == 1 and all(makers[value].integer for value in observed) else None
    configs = [makers[value].qconfig for value in observed]
    configs += [step.qconfig for step in steps if step.integer and set(step.inputs) & set(values)]
    qconfig = next((config for config in configs if config is not None), recipe.default or QConfig())
    return Slot(makers[observed[0]].name, values, observed, qconfig, known)


def output_values(graph: Graph) -> list[int]:
    """The values that the graph gives back, in order."""
    return [leaf.index for leaf in leaves(graph.output) if isinstance(leaf, Ref)]


def name_of(node: Node) -> str:
    """What a node calls, for people."""
    return what_name(node) if node.kind != "module" else node.label
