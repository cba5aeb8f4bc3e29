"""From a captured graph to a plan: which calls become one integer step, which values are uint8, which share a range.

The plan is what prepare observes, what training simulates and what convert builds, so that the three cannot disagree.
Nothing here computes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from quant.capture.calls import says_it_writes
from quant.folding import Affine, ChannelShift
from quant.fusion.concat_ranges import Groups, join
from quant.fusion.float_values import float_streams, gives_reals, wanted_as_reals, wanted_unrounded
from quant.graph import Graph, Node
from quant.ops.arithmetic import Add, Mul
from quant.ops.call import StaysFloat
from quant.ops.concat import Concat
from quant.ops.idle import Identity
from quant.ops.linear import Linear
from quant.ops.lookup import Lookup
from quant.ops.moves import Move
from quant.ops.operator import Float, Operator, Recurrent, ShapeOnly, Weighted
from quant.ops.recurrent import Cell, Sequence
from quant.ops.registry import Recognised, recognise
from quant.ops.shapes import reads_only_rank, reads_only_shape
from quant.ops.step import Step
from quant.recipe import QConfig, Recipe
from quant.runtime.names import attribute, full_name
from quant.runtime.trees import Ref

RULES = 4
"""Version of what is decided here about float values, shared ranges and biases. A saved model is planned by the rules
that it was converted by: 1 kept sums in integers that float steps read too, and gave all inputs of a concatenation its
range; 2 rounded what the caller or a float step reads wherever integer steps read it too, had a table for each of
several functions in a row, moved values for an nn.Identity, and corrected biases that a layer does not have; 3 had a
table, and a range, for sums with 0 and products with 1."""


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
        floats: what stays float whatever the recipe says, and why; as given to `make_plan`.
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
        emits = step.integer and step.output in self.slot_of and step.output not in self.as_reals
        return emits and not isinstance(step.operator, Cell)

    def read_both_ways(self) -> set[int]:
        """Values made in float that integer steps read rounded, and float steps or the caller as they are."""
        steps = {index: step for step in self.steps for index in step.nodes}
        wanted = wanted_as_reals(self.steps, self.graph.users())
        return {value for value in self.slot_of
                if value in wanted and (not steps[value].integer or value in self.as_reals)}  # fmt: skip

    def inner_slots(self, step: Step) -> dict[str, str]:
        """Of a recurrent step: the slot of each range inside of it, by the range's name."""
        assert isinstance(step.operator, Recurrent)
        path = self.graph.nodes[step.nodes[0]].target
        return {name: self.inner[path, name] for name in step.operator.ranges}

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
        floats: what stays float whatever the recipe says, and why: layers by their names within root, other steps by
            their own.
        rules: by which sums stay float and ranges are shared (`RULES`).
    """
    steps = _take_outputs(_steps(graph, root, recipe, floats or {}), graph)
    _look_at_inputs(steps, graph, root)
    users = graph.users()
    if rules > 3:
        _find_identities(steps)
    if rules > 2:
        steps = _drop_identities(steps, users)
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
            steps.append(Step(ShapeOnly(), (node.index,), name=node.label))
            continue
        has_form = False
        try:
            known = recognise(node, graph, root)
            if not known.operator.anchor and node.label in floats:
                raise StaysFloat(floats[node.label])  # as if there were no kernel: sums that it reads stay float too
            has_form = True
            qconfig = _qconfig(node, known, graph, root, recipe, floats)
            steps.append(Step(known.operator, (node.index,), known.inputs, node.label, qconfig))
        except StaysFloat as reason:
            steps.append(Step(Float(str(reason), has_form), (node.index,), name=node.label))
    return steps


def _qconfig(
    node: Node, known: Recognised, graph: Graph, root: nn.Module, recipe: Recipe, floats: Mapping[str, str]
) -> QConfig | None:
    if not known.operator.anchor:
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
        if isinstance(step.operator, Sequence) and step.output in first:
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
    return isinstance(step.operator, (Lookup, Add, Mul, Weighted, Identity))


def _of_same_rank(step: Step, graph: Graph) -> int:
    def rank(value: int) -> int:
        meta = graph.nodes[value].meta
        return len(meta.shape) if meta is not None else 0

    return max(step.inputs, key=rank)


def _find_identities(steps: list[Step]) -> None:
    """Let functions that give their input be what nn.Identity is: a range of their own would round once more."""
    for step in steps:
        if isinstance(step.operator, Lookup) and step.operator.gives_input:
            step.operator = Identity()


def _drop_identities(steps: list[Step], users: dict[int, list[int]]) -> list[Step]:
    """Take identities into the integer step before them, so that they do not keep what follows from being fused."""
    by_output = {step.output: step for step in steps}
    gone: set[int] = set()
    for step in steps:
        if not isinstance(step.operator, Identity):
            continue
        before = by_output[step.inputs[0]]
        known = before.operator
        computes = known.integer and not known.shares_range and not isinstance(known, Recurrent)
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
        if not isinstance(step.operator, Lookup) or users[step.inputs[0]] != [step.nodes[0]]:
            continue
        before = by_output[step.inputs[0]]
        fused = _fused(before, step, step.operator, graph, root)
        if fused is None or _is_written_between(before, step, graph, root):
            continue
        before.operator = fused
        before.nodes = (*before.nodes, *step.nodes)
        by_output[before.output] = before
        gone.add(id(step))
    kept = [step for step in steps if id(step) not in gone]
    for step in kept:
        if isinstance(step.operator, Lookup) and step.operator.only_folded:
            reason = "its operand is no activation, and no layer before it takes it in"
            step.operator, step.inputs = Float(reason), ()
    return sorted(kept, key=lambda step: step.output)


def _fused(before: Step, step: Step, lookup: Lookup, graph: Graph, root: nn.Module) -> Operator | None:
    """The operator of `before` that does what `step`, a function of its value, does as well; None if there is none."""
    known = before.operator
    if lookup.is_batch_norm and isinstance(known, Weighted) and _takes_batch_norm(before, graph, root):
        return replace(known, batch_norm=step.nodes[0])
    if lookup.affine is not None and isinstance(known, Weighted) and _takes_affine(before, lookup.affine, graph, root):
        return replace(known, affine=(*known.affine, lookup.affine))
    if isinstance(known, (Weighted, Add, Mul)) and known.clamp is None and lookup.clamp is not None:
        low, high = lookup.clamp
        return replace(known, clamp=lookup.clamp) if low <= 0.0 <= high else None
    return None


def _join_lookups(steps: list[Step], graph: Graph, root: nn.Module, users: dict[int, list[int]]) -> list[Step]:
    """Make one table of functions that follow each other, as an activation and the batch norm after it."""
    by_output = {step.output: step for step in steps}
    gone: set[int] = set()
    for step in steps:
        before = by_output[step.inputs[0]] if isinstance(step.operator, Lookup) else step
        if not isinstance(before.operator, Lookup) or before is step or users[before.output] != [step.nodes[0]]:
            continue
        if _is_written_between(before, step, graph, root):
            continue
        assert isinstance(step.operator, Lookup)
        before.operator = Lookup(per_channel=before.operator.per_channel or step.operator.per_channel)
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
    known = before.operator
    assert isinstance(known, Weighted)
    if not _is_folded_into(before, graph, root) or known.is_folded or known.clamp is not None:
        return False
    meta = graph.nodes[before.output].meta
    return meta is not None and (not isinstance(known, Linear) or len(meta.shape) == 2)


def _takes_affine(before: Step, affine: Affine, graph: Graph, root: nn.Module) -> bool:
    """Whether a number per channel may go into the weight; after a batch norm or a clamp it may not."""
    known = before.operator
    assert isinstance(known, Weighted)
    if not _is_folded_into(before, graph, root) or known.batch_norm is not None or known.clamp is not None:
        return False
    meta = graph.nodes[before.output].meta
    fits = affine.axis in (0, known.input_channel_axis)  # the output's lie along the same axis as the input's
    return meta is not None and (fits or (len(meta.shape) == 2 and isinstance(known, Linear)))


def _is_folded_into(before: Step, graph: Graph, root: nn.Module) -> bool:
    """Whether a step has a weight to fold into that no other call needs as it is."""
    return isinstance(before.operator, Weighted) and not _is_called_again(graph.nodes[before.nodes[0]], graph, root)


def _is_called_again(node: Node, graph: Graph, root: nn.Module) -> bool:
    """Whether the module that `node` calls is called by another node too, under this name or another."""
    if node.kind != "module":
        return False
    module = attribute(root, node.target)
    calls = [one for one in graph.nodes if one.kind == "module" and attribute(root, one.target) is module]
    return len(calls) > 1


def _choose_domains(steps: list[Step], graph: Graph, users: dict[int, list[int]], rules: int) -> None:
    """Integers between integers: what has no integer neighbour on both sides stays, or becomes, float."""
    by_node = {index: step for step in steps for index in step.nodes}
    computing = {step.output for step in steps if _is_computation(step)}
    moving = {step.output for step in steps if isinstance(step.operator, Move)}

    def demote(step: Step, reason: str) -> None:
        step.operator, step.inputs = Float(reason, form=step.operator if len(step.nodes) == 1 else None), ()

    def demote_unread() -> None:
        for step in reversed(steps):
            if not step.integer or step.operator.anchor:
                continue
            readers = [by_node[user] for user in users[step.output] if user < len(graph.nodes)]
            # A cell is an integer step, and yet reads its state as a float.
            if not any(reader.integer and step.output in reader.inputs for reader in readers):
                demote(step, "what reads it is float")

    def demote_given_reals() -> None:
        for step in steps:
            if step.integer and not step.operator.anchor and not any(by_node[value].integer for value in step.inputs):
                demote(step, "what it reads is float")

    def demote_parts() -> None:
        for step in steps:
            if isinstance(step.operator, Move) and _part_of_float(step, graph, by_node):
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


def _is_computation(step: Step) -> bool:
    """Whether a step is float because no kernel has integers for it."""
    return isinstance(step.operator, Float) and not step.operator.has_integer_form


def _reads_shape(step: Step) -> bool:
    return isinstance(step.operator, ShapeOnly)


def _correct_own_biases(steps: list[Step]) -> None:
    """Correct no bias of layers without one: they map zeros to zeros, which a norm after them would blow up else."""
    for step in steps:
        layer = step.operator
        if step.qconfig is None or not isinstance(layer, Weighted):
            continue
        shifted = layer.batch_norm is not None or any(isinstance(one, ChannelShift) for one in layer.affine)
        if layer.bias is None and not shifted:
            step.qconfig = replace(step.qconfig, bias_correction=False)


def _part_of_float(step: Step, graph: Graph, by_node: dict[int, Step]) -> bool:
    """A part of a tuple that a float step made: there is no one tensor to quantise before it."""
    return graph.nodes[step.inputs[0]].meta is None and not by_node[step.inputs[0]].integer


def _share_ranges(steps: list[Step], graph: Graph, recipe: Recipe, users: dict[int, list[int]], rules: int) -> Plan:
    read = {value for step in steps if step.integer for value in step.inputs}
    inside = _inner_ranges(steps, graph)
    groups = Groups([*read, *inside])
    inside_of = {key: value for value, key in inside.items()}
    sharing = {step.output: step for step in steps if step.operator.shares_range and step.output in read}
    cats = [step for step in sharing.values() if isinstance(step.operator, Concat) and rules > 1]
    for step in sharing.values():
        for value in step.inputs if rules < 2 or not isinstance(step.operator, Concat) else ():
            groups.join(value, step.output)
    modules: dict[str, int] = {}
    for step in steps:
        if isinstance(step.operator, Recurrent):
            # One int8 layer, wherever it is called from: one range of its input, one of each layer's states.
            path = graph.nodes[step.nodes[0]].target
            groups.join(modules.setdefault(path, step.inputs[0]), step.inputs[0])
            if isinstance(step.operator, Sequence) and step.output in read:
                groups.join(inside_of[path, step.operator.ranges[-1]], step.output)
    by_node = {index: step for step in steps for index in step.nodes}

    def keeps(group: int, user: int) -> bool:
        reader = by_node.get(user)
        if reader is None or _reads_shape(reader):
            return reader is not None
        return reader.output in sharing and groups.find(reader.output) == group

    joins = join(cats, groups, users, keeps)
    makers = {step.output: step for step in steps}

    def shown(value: int) -> bool:
        maker = makers[value]
        moved = maker.operator.shares_range or isinstance(maker.operator, Sequence)
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
        if isinstance(step.operator, Recurrent):
            for name in step.operator.ranges:
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
    return isinstance(step.operator, Recurrent)
