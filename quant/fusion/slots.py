"""Which values share a range: those joined by views, by concatenations, and by calls of one recurrent layer."""

from __future__ import annotations

from collections.abc import Callable

from quant.fusion.concat_ranges import Groups, Joins, join
from quant.fusion.fused_graph import FusedGraph, Slot
from quant.graph import Graph
from quant.ops.concat import Concat
from quant.ops.operator import Recurrent, ShapeOnly
from quant.ops.recurrent import Sequence
from quant.ops.step import Step
from quant.recipe import QConfig, Recipe
from quant.runtime.names import full_name


def share_ranges(
    steps: list[Step], graph: Graph, recipe: Recipe, users: dict[int, list[int]], rules: int
) -> FusedGraph:
    """The fused graph: a slot for each group of values that share a range.

    Args:
        steps: of the graph, in order; which of them compute in integers is decided.
        users: of `Graph.users`.
        recipe, rules: as of `fuse`.
    """
    read = {value for step in steps if step.integer for value in step.inputs}
    inner = _inner_ranges(steps, graph)
    groups = Groups([*read, *inner])
    sharing = {step.output: step for step in steps if step.operator.shares_range and step.output in read}
    cats = [step for step in sharing.values() if isinstance(step.operator, Concat) and rules > 1]
    for step in sharing.values():
        for value in step.inputs if rules < 2 or not isinstance(step.operator, Concat) else ():
            groups.join(value, step.output)
    _join_recurrent(groups, steps, graph, read, inner)
    joins = join(cats, groups, users, _keeps(steps, sharing, groups))
    makers = {step.output: step for step in steps}
    fused = FusedGraph(graph, steps, {}, {})
    for group in groups.all().values():
        keys = [inner[value] for value in group if value < 0]
        values = [value for value in group if value >= 0]
        observed = [value for value in values if _is_observed(makers[value], joins)]
        slot = _slot(values, observed, keys, steps, makers, graph, recipe)
        fused.slots[slot.name] = slot
        fused.slot_of.update(dict.fromkeys(slot.values, slot.name))
        fused.inner.update(dict.fromkeys(keys, slot.name))
    fused.joined = _joined_slots(fused, cats)
    return fused


def _join_recurrent(
    groups: Groups, steps: list[Step], graph: Graph, read: set[int], inner: dict[int, tuple[str, str]]
) -> None:
    """One int8 layer for all calls of a recurrent one: one range for its input, and one for each layer's states."""
    numbers = {key: number for number, key in inner.items()}
    first_inputs: dict[str, int] = {}
    for step in steps:
        if isinstance(step.operator, Recurrent):
            path = graph.nodes[step.nodes[0]].target
            groups.join(first_inputs.setdefault(path, step.inputs[0]), step.inputs[0])
            if isinstance(step.operator, Sequence) and step.output in read:
                groups.join(numbers[path, step.operator.ranges[-1]], step.output)


def _keeps(steps: list[Step], sharing: dict[int, Step], groups: Groups) -> Callable[[int, int], bool]:
    """The question of `join`: is a user a view within the group? Reading a shape counts as one."""
    by_node = {index: step for step in steps for index in step.nodes}

    def keeps(group: int, user: int) -> bool:
        reader = by_node.get(user)
        if reader is None or isinstance(reader.operator, ShapeOnly):
            return reader is not None
        return reader.output in sharing and groups.find(reader.output) == group

    return keeps


def _is_observed(maker: Step, joins: Joins) -> bool:
    """Whether the observer is shown a step's output; not where it is shown the same numbers elsewhere."""
    shows_elsewhere = maker.operator.shares_range or isinstance(maker.operator, Sequence)
    return maker.output not in joins.covered and (not shows_elsewhere or maker.output in joins.rescaling)


def _joined_slots(fused: FusedGraph, cats: list[Step]) -> tuple[tuple[str, str], ...]:
    """The slots of concatenations, each with that of an input that has a range of its own."""
    pairs = [(fused.slot_of[cat.output], fused.slot_of[value]) for cat in cats for value in cat.inputs]
    return tuple(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))


def _inner_ranges(steps: list[Step], graph: Graph) -> dict[int, tuple[str, str]]:
    """The ranges inside recurrent layers, as (path, name), with negative numbers where values have positive ones."""
    numbers: dict[tuple[str, str], int] = {}
    for step in steps:
        if isinstance(step.operator, Recurrent):
            for name in step.operator.ranges:
                numbers.setdefault((graph.nodes[step.nodes[0]].target, name), -1 - len(numbers))
    return {number: key for key, number in numbers.items()}


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
    return Slot(name, values, observed, qconfig, inner, any(step.reads_two_bytes for step in readers))
