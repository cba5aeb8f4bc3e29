"""From a captured graph to a plan: which calls become one integer step, which values are uint8, which share a range.

The plan is what prepare observes, what training simulates and what convert builds, so that the three cannot disagree.
Nothing here computes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from quant.capture.calls import says_it_writes
from quant.graph import Graph, Node, Ref, attribute
from quant.names import full_name
from quant.recipe import QConfig, Recipe
from quant.static.folding import Affine
from quant.static.joins import Groups, join
from quant.static.meaning import Meaning, StaysFloat, reads_only_rank, reads_only_shape, what
from quant.static.recognise import OPERATORS, recognise
from quant.static.streams import float_streams, gives_reals, wanted_as_reals, wanted_unrounded

FLOAT, SHAPE = "float", "shape"

RULES = 3
"""Version of what is decided here about float values, shared ranges and biases. A saved model is planned by the rules
that it was converted by: 1 kept sums in integers that float steps read too, and gave all inputs of a concatenation its
range; 2 rounded what the caller or a float step reads wherever integer steps read it too, had a table for each of
several functions in a row, moved values for an nn.Identity, and corrected biases that a layer does not have."""


@dataclass
class Step:
    """One or more captured calls that are computed together.

    Attributes:
        op: an entry of `recognise.OPERATORS`; "float" for the user's own arithmetic, "shape" for what reads no values.
        nodes: indices of the calls, in order; the value of the last is the step's.
        inputs: the values it reads as activations.
        attrs: settings, as `recognise` gives them, and `batch_norm`: the node that was folded in, `affine`: what else
            was, as `Affine`s, `clamp`: (low, high).
            Of a recurrent layer `ranges`: the names of the ranges inside of it, each a slot's by `Plan.inner`. `left`:
            it has an integer form, and the recipe or convert leaves it float.
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
        inner: the ranges inside of recurrent layers that it is, as (path, name).
    """

    name: str
    values: list[int]
    observed: list[int]
    qconfig: QConfig
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
        joined: of each concatenation with ranges of its inputs that are not its own: its slot, and such an input's.
        rules: as given to `make_plan`.
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

        So do those of `as_reals`, and cells, whose state goes round in the user's loop as a float; it is quantised for
        whoever else reads it.
        """
        return step.integer and step.output in self.slot_of and step.op != "cell" and step.output not in self.as_reals

    def read_both_ways(self) -> set[int]:
        """Values made in float that integer steps read rounded, and float steps or the caller as they are."""
        steps = {index: step for step in self.steps for index in step.nodes}
        wanted = wanted_as_reals(self.steps, self.graph.users())
        return {value for value in self.slot_of
                if value in wanted and (not steps[value].integer or value in self.as_reals)}  # fmt: skip

    def inner_slots(self, step: Step) -> dict[str, str]:
        """Of a recurrent step: the slot of each range inside of it, by the range's name."""
        path = self.graph.nodes[step.nodes[0]].target
        return {name: self.inner[path, name] for name in step.attrs["ranges"]}

    def slot_like(self, other: Slot) -> str:
        """The slot that holds the values of another plan's slot, of the same graph."""
        # The last value: a concatenation has the range that its inputs may have had apart.
        return self.slot_of[other.values[-1]] if other.values else self.inner[other.inner[0]]

    def again(self, root: nn.Module, recipe: Recipe, floats: Mapping[str, str], rules: int | None = None) -> Plan:
        """Another plan of the same graph, with more layers in float, or by other rules."""
        plan = make_plan(self.graph, root, recipe, {**self.floats, **floats}, self.rules if rules is None else rules)
        plan.shared = self.shared
        return plan


def make_plan(
    graph: Graph, root: nn.Module, recipe: Recipe, floats: Mapping[str, str] | None = None, rules: int = RULES
) -> Plan:
    """Read a captured graph.

    Args:
        root: the captured module.
        recipe: decides on weighted layers by their full names; what stands between them follows.
        floats: layers that stay float whatever the recipe says, by their names within root, and why.
        rules: by which sums stay float and ranges are shared (`RULES`).
    """
    steps = _take_outputs(_steps(graph, root, recipe, floats or {}), graph)
    _look_at_inputs(steps, graph, root)
    users = graph.users()
    if rules > 2:
        steps = _drop_identities(steps, graph, root, users)
    steps = _fuse(steps, graph, root, users)
    if rules > 2:
        steps = _join_lookups(steps, graph, root, users)
    _choose_domains(steps, graph, users, rules)
    plan = _share_ranges(steps, graph, recipe, users, rules)
    plan.floats, plan.rules = dict(floats or {}), rules
    if rules > 2:
        plan.as_reals = frozenset(
            step.output for step in steps if gives_reals(step) and step.output in plan.slot_of
        ) & wanted_as_reals(steps, users)
        _correct_own_biases(steps)
    return plan


def _steps(graph: Graph, root: nn.Module, recipe: Recipe, floats: Mapping[str, str]) -> list[Step]:
    steps = []
    for node in graph.nodes:
        if node.kind in ("input", "guard") or reads_only_shape(node):
            steps.append(Step(SHAPE, (node.index,), name=node.label))
            continue
        attrs: dict[str, Any] = {}
        try:
            meaning = recognise(node, graph, root)
            attrs = {"left": True}
            qconfig = _qconfig(node, meaning, graph, root, recipe, floats)
            steps.append(Step(meaning.op, (node.index,), meaning.inputs, meaning.attrs, node.label, qconfig=qconfig))
        except StaysFloat as reason:
            steps.append(Step(FLOAT, (node.index,), attrs=attrs, name=node.label, reason=str(reason)))
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
        if node.target is operator.getitem and isinstance(node.args[0], Ref) and node.meta
        # An index may be a tensor, whose comparison with 0 is no truth value.
        and type(node.args[1]) is int and node.args[1] == 0
    }  # fmt: skip
    taken: set[int] = set()
    for step in steps:
        if step.op == "sequence" and step.output in first:
            step.nodes = (*step.nodes, first[step.output])
            taken.add(step.output)
    kept = [step for step in steps if len(step.nodes) > 1 or step.output not in taken]
    return sorted(kept, key=lambda step: step.output)


def _look_at_inputs(steps: list[Step], graph: Graph, root: nn.Module) -> None:
    """Let what asks for a value's rank (batch norms check it) ask for that of an earlier value, which is the same.

    So it is no reader of a value that folding does away with.
    """
    sources = {step.output: _of_same_rank(step, graph) for step in steps if _keeps_rank(step, graph, root)}
    for index, node in enumerate(graph.nodes):
        if reads_only_rank(node) and isinstance(node.args[0], Ref):
            value = node.args[0].index
            while value in sources:
                value = sources[value]
            graph.nodes[index] = replace(node, args=(Ref(value), *node.args[1:]))


def _keeps_rank(step: Step, graph: Graph, root: nn.Module) -> bool:
    """Whether an integer step that may be fused with others has the rank of one of its inputs."""
    computes = step.op in ("lookup", "add", "mul") or (step.integer and OPERATORS[step.op].weighted)
    return computes or _is_identity(step, graph, root)


def _of_same_rank(step: Step, graph: Graph) -> int:
    def rank(value: int) -> int:
        meta = graph.nodes[value].meta
        return len(meta.shape) if meta is not None else 0

    return max(step.inputs, key=rank)


def _is_identity(step: Step, graph: Graph, root: nn.Module) -> bool:
    """Whether a step is an nn.Identity."""
    node = graph.nodes[step.nodes[0]]
    return step.op == "pass" and node.kind == "module" and what(node, root) == "Identity"


def _drop_identities(steps: list[Step], graph: Graph, root: nn.Module, users: dict[int, list[int]]) -> list[Step]:
    """Take an nn.Identity into the integer step before it, so that it does not keep what follows from being fused."""
    by_output = {step.output: step for step in steps}
    gone: set[int] = set()
    for step in steps:
        if not _is_identity(step, graph, root):
            continue
        before = by_output[step.inputs[0]]
        computes = before.integer and not OPERATORS[before.op].shares and not OPERATORS[before.op].recurrent
        if computes and users[before.output] == [step.output]:
            before.nodes = (*before.nodes, *step.nodes)
            by_output[before.output] = before
            gone.add(id(step))
    return sorted((step for step in steps if id(step) not in gone), key=lambda step: step.output)


def _fuse(steps: list[Step], graph: Graph, root: nn.Module, users: dict[int, list[int]]) -> list[Step]:
    """Fold batch norms and clamps into the step before, where nothing else reads the value between them."""
    by_output = {step.output: step for step in steps}
    gone: set[int] = set()
    for step in steps:
        if step.op != "lookup" or users[step.inputs[0]] != [step.nodes[0]]:
            continue
        before = by_output[step.inputs[0]]
        if _is_written_between(before, step, graph, root):
            continue
        affine = step.attrs.get("affine")
        if step.attrs.get("is_batch_norm") and _takes_batch_norm(before, graph, root):
            before.attrs["batch_norm"] = step.nodes[0]
        elif affine is not None and _takes_affine(before, affine, graph, root):
            before.attrs["affine"] = (*before.attrs.get("affine", ()), affine)
        elif step.attrs.get("clamp") and _takes_clamp(before, step):
            before.attrs["clamp"] = step.attrs["clamp"]
        else:
            continue
        before.nodes = (*before.nodes, *step.nodes)
        by_output[before.output] = before
        gone.add(id(step))
    kept = [step for step in steps if id(step) not in gone]
    for step in kept:
        if step.op == "lookup" and step.attrs.get("only_folded"):
            step.op, step.inputs, step.reason = (
                FLOAT,
                (),
                "its operand is no activation, and no layer before it takes it in",
            )
    return sorted(kept, key=lambda step: step.output)


def _join_lookups(steps: list[Step], graph: Graph, root: nn.Module, users: dict[int, list[int]]) -> list[Step]:
    """Make one table of functions that follow each other, as an activation and the batch norm after it."""
    by_output = {step.output: step for step in steps}
    gone: set[int] = set()
    for step in steps:
        before = by_output[step.inputs[0]] if step.op == "lookup" else step
        alone = before.op == "lookup" and before is not step and users[before.output] == [step.nodes[0]]
        if not alone or _is_written_between(before, step, graph, root):
            continue
        channels = before.attrs["channels"] or step.attrs["channels"]
        before.attrs = {"channels": channels, "clamp": None}
        before.nodes = (*before.nodes, *step.nodes)
        by_output[before.output] = before
        gone.add(id(step))
    return sorted((step for step in steps if id(step) not in gone), key=lambda step: step.output)


def _is_written_between(before: Step, step: Step, graph: Graph, root: nn.Module) -> bool:
    """Whether an input of a step is changed in place before what would be fused into it, so that it were read late."""
    for index in range(before.nodes[0] + 1, step.nodes[0]):
        node = graph.nodes[index]
        module = attribute(root, node.target) if node.kind == "module" else None
        if node.writes or (
            says_it_writes(node.kind, node.target, node.kwargs, module) and {*node.refs} & {*before.inputs}
        ):
            return True
    return False


def _takes_batch_norm(before: Step, graph: Graph, root: nn.Module) -> bool:
    if not _is_folded_into(before, graph, root) or {"batch_norm", "affine", "clamp"} & {*before.attrs}:
        return False
    meta = graph.nodes[before.output].meta
    return meta is not None and (before.op != "linear" or len(meta.shape) == 2)


def _takes_affine(before: Step, affine: Affine, graph: Graph, root: nn.Module) -> bool:
    """Whether a number per channel may go into the weight; after a batch norm or a clamp it may not."""
    if not _is_folded_into(before, graph, root) or {"batch_norm", "clamp"} & {*before.attrs}:
        return False
    meta = graph.nodes[before.output].meta
    channels = -1 if before.op == "linear" else 1
    return meta is not None and (affine.axis in (0, channels) or (len(meta.shape) == 2 and before.op == "linear"))


def _is_folded_into(before: Step, graph: Graph, root: nn.Module) -> bool:
    """Whether a step has a weight to fold into that no other call needs as it is."""
    weighted = before.integer and OPERATORS[before.op].weighted
    return weighted and not _is_called_again(graph.nodes[before.nodes[0]], graph, root)


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


def _choose_domains(steps: list[Step], graph: Graph, users: dict[int, list[int]], rules: int) -> None:
    """Integers between integers: what has no integer neighbour on both sides stays, or becomes, float."""
    by_node = {index: step for step in steps for index in step.nodes}
    computing = {step.output for step in steps if step.op == FLOAT and "left" not in step.attrs}
    moving = {step.output for step in steps if step.op == "pass"}

    def demote(step: Step, reason: str) -> None:
        step.op, step.reason, step.inputs = FLOAT, reason, ()

    def demote_unread() -> None:
        for step in reversed(steps):
            if not step.integer or OPERATORS[step.op].anchor:
                continue
            readers = [by_node[user] for user in users[step.output] if user < len(graph.nodes)]
            # A cell is an integer step, and yet reads its state as a float.
            if not any(reader.integer and step.output in reader.inputs for reader in readers):
                demote(step, "what reads it is float")

    def demote_given_reals() -> None:
        for step in steps:
            if (
                step.integer
                and not OPERATORS[step.op].anchor
                and not any(by_node[value].integer for value in step.inputs)
            ):
                demote(step, "what it reads is float")

    def demote_parts() -> None:
        for step in steps:
            if step.op == "pass" and _part_of_float(step, graph, by_node):
                demote(step, "what it reads is float")

    demote_given_reals()
    demote_unread()
    demote_parts()
    for step in float_streams(steps, users, computing, moving) if rules > 1 else ():
        demote(step, "float steps read it too")
    if rules > 2:
        for step in wanted_unrounded(steps, users):
            demote(step, "float steps or the caller read it too")
        demote_given_reals()
        demote_parts()
    demote_unread()


def _correct_own_biases(steps: list[Step]) -> None:
    """Correct no bias of layers without one: they map zeros to zeros, which a norm after them would blow up else."""
    for step in steps:
        if step.qconfig is None or not step.integer or not OPERATORS[step.op].weighted:
            continue
        shifted = "batch_norm" in step.attrs or any(one.op == "add" for one in step.attrs.get("affine", ()))
        if step.attrs["bias"] is None and not shifted:
            step.qconfig = replace(step.qconfig, bias_correction=False)


def _part_of_float(step: Step, graph: Graph, by_node: dict[int, Step]) -> bool:
    """A part of a tuple that a float step made: there is no one tensor to quantise before it."""
    return graph.nodes[step.inputs[0]].meta is None and not by_node[step.inputs[0]].integer


def _share_ranges(steps: list[Step], graph: Graph, recipe: Recipe, users: dict[int, list[int]], rules: int) -> Plan:
    read = {value for step in steps if step.integer for value in step.inputs}
    inside = _inner_ranges(steps, graph)
    groups = Groups([*read, *inside])
    inside_of = {key: value for value, key in inside.items()}
    sharing = {
        step.output: step for step in steps if step.integer and OPERATORS[step.op].shares and step.output in read
    }
    cats = [step for step in sharing.values() if step.op == "cat" and rules > 1]
    for step in sharing.values():
        for value in step.inputs if step.op != "cat" or rules < 2 else ():
            groups.join(value, step.output)
    modules: dict[str, int] = {}
    for step in steps:
        if is_recurrent(step):
            # One int8 layer, wherever it is called from: one range of its input, one of each layer's states.
            path = graph.nodes[step.nodes[0]].target
            groups.join(modules.setdefault(path, step.inputs[0]), step.inputs[0])
            if step.op == "sequence" and step.output in read:
                groups.join(inside_of[path, step.attrs["ranges"][-1]], step.output)
    by_node = {index: step for step in steps for index in step.nodes}

    def keeps(group: int, user: int) -> bool:
        reader = by_node.get(user)
        if reader is None or reader.op == SHAPE:
            return reader is not None
        return reader.output in sharing and groups.find(reader.output) == group

    joins = join(cats, groups, users, keeps)
    makers = {step.output: step for step in steps}

    def shown(value: int) -> bool:
        maker = makers[value]
        moved = maker.integer and (OPERATORS[maker.op].shares or maker.op == "sequence")
        return value not in joins.covered and (not moved or value in joins.rescaling)

    plan = Plan(graph, steps, {}, {})
    for group in groups.all().values():
        keys = [inside[value] for value in group if value < 0]
        values = [value for value in group if value >= 0]
        slot = _slot(values, [value for value in values if shown(value)], keys, steps, makers, graph, recipe)
        plan.slots[slot.name] = slot
        plan.slot_of.update(dict.fromkeys(slot.values, slot.name))
        plan.inner.update(dict.fromkeys(keys, slot.name))
    plan.joined = tuple(
        dict.fromkeys(
            (plan.slot_of[cat.output], plan.slot_of[value])
            for cat in cats
            for value in cat.inputs
            if plan.slot_of[value] != plan.slot_of[cat.output]
        )
    )
    return plan


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
    observed: list[int],
    inner: list[tuple[str, str]],
    steps: list[Step],
    makers: dict[int, Step],
    graph: Graph,
    recipe: Recipe,
) -> Slot:
    paths = {path for path, _ in inner}
    configs = [step.qconfig for step in steps if step.integer and graph.nodes[step.nodes[0]].target in paths]
    configs += [makers[value].qconfig for value in observed]
    readers = [step for step in steps if step.integer and set(step.inputs) & set(values)]
    configs += [step.qconfig.for_inputs() for step in readers if step.qconfig is not None]
    qconfig = next((config for config in configs if config is not None), recipe.default or QConfig())
    name = full_name(*inner[-1]) if inner else makers[observed[0]].name
    return Slot(name, values, observed, qconfig, inner)


def is_recurrent(step: Step) -> bool:
    """Whether the step is an int8 layer with states."""
    return step.integer and OPERATORS[step.op].recurrent
