"""Steps that become one: batch norms, clamps and identities with the step before, tables with each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from quant.capture.calls import says_it_writes
from quant.folding import Affine
from quant.graph import Graph, Kind, Node
from quant.ops.arithmetic import Add, Mul
from quant.ops.idle import Identity
from quant.ops.linear import Linear
from quant.ops.lookup import Lookup
from quant.ops.operator import Float, Operator, Recurrent, Weighted
from quant.ops.shapes import reads_only_rank
from quant.ops.step import Step
from quant.ops.views import View
from quant.runtime.names import attribute
from quant.runtime.trees import Ref


def read_ranks_early(steps: list[Step], graph: Graph) -> None:
    """Let calls that ask for a value's rank, as batch norms do, ask an earlier value of the same rank.

    So they do not read a value that folding removes.
    """
    sources = {step.output: _of_same_rank(step, graph) for step in steps if _keeps_rank(step)}
    for index, node in enumerate(graph.nodes):
        if reads_only_rank(node) and isinstance(node.args[0], Ref):
            value = node.args[0].index
            while value in sources:
                value = sources[value]
            graph.nodes[index] = replace(node, args=(Ref(value), *node.args[1:]))


def _keeps_rank(step: Step) -> bool:
    """Whether the step may be joined with others and gives the rank of one of its inputs."""
    return isinstance(step.operator, (Lookup, Add, Mul, Weighted, Identity))


def _of_same_rank(step: Step, graph: Graph) -> int:
    """The input whose rank the step gives: the largest, as operands are broadcast."""

    def rank(value: int) -> int:
        meta = graph.nodes[value].meta
        return len(meta.shape) if meta is not None else 0

    return max(step.inputs, key=rank)


def find_identities(steps: list[Step]) -> None:
    """Treat functions that give their input as nn.Identity: a range of their own would round once more."""
    for step in steps:
        if isinstance(step.operator, Lookup) and step.operator.gives_input:
            step.operator = Identity()


def drop_identities(steps: list[Step], graph: Graph, root: nn.Module, users: dict[int, list[int]]) -> list[Step]:
    """Join each identity with the integer step before it, so that later steps can be joined too."""
    memory = _Memory(steps, graph, root)
    by_output = {step.output: step for step in steps}
    gone: set[int] = set()
    for step in steps:
        if not isinstance(step.operator, Identity):
            continue
        before = by_output[step.inputs[0]]
        known = before.operator
        computes = known.integer and not known.shares_range and not isinstance(known, Recurrent)
        if computes and users[before.output] == [step.output] and not memory.is_written_between(before, step):
            before.nodes = (*before.nodes, *step.nodes)
            by_output[before.output] = before
            gone.add(id(step))
    return sorted((step for step in steps if id(step) not in gone), key=lambda step: step.output)


def fold_into_layers(steps: list[Step], graph: Graph, root: nn.Module, users: dict[int, list[int]]) -> list[Step]:
    """Fold batch norms, channel scales and clamps into the step before, where nothing else reads the value between."""
    memory = _Memory(steps, graph, root)
    by_output = {step.output: step for step in steps}
    again = _called_again(graph, root)
    gone: set[int] = set()
    for step in steps:
        if not isinstance(step.operator, Lookup) or users[step.inputs[0]] != [step.nodes[0]]:
            continue
        before = by_output[step.inputs[0]]
        joined = _joined(before, step, step.operator, graph, again)
        if joined is None or memory.is_written_between(before, step):
            continue
        before.operator = joined
        before.nodes = (*before.nodes, *step.nodes)
        by_output[before.output] = before
        gone.add(id(step))
    kept = [step for step in steps if id(step) not in gone]
    for step in kept:
        if isinstance(step.operator, Lookup) and step.operator.only_folded:
            reason = "its operand is no activation, and no layer before it can absorb it"
            step.operator, step.inputs = Float(reason), ()
    return sorted(kept, key=lambda step: step.output)


def _joined(before: Step, step: Step, lookup: Lookup, graph: Graph, again: set[int]) -> Operator | None:
    """One operator for `before` and `step`, which is a function of its value; None where there is none.

    Args:
        again: of `_called_again`.
    """
    known = before.operator
    if lookup.is_batch_norm and isinstance(known, Weighted) and _takes_batch_norm(before, graph, again):
        return replace(known, batch_norm=step.nodes[0])
    if lookup.affine is not None and isinstance(known, Weighted) and _takes_affine(before, lookup.affine, graph, again):
        return replace(known, affine=(*known.affine, lookup.affine))
    if isinstance(known, (Weighted, Add, Mul)) and known.clamp is None and lookup.clamp is not None:
        low, high = lookup.clamp
        return replace(known, clamp=lookup.clamp) if low <= 0.0 <= high else None
    return None


def join_lookups(steps: list[Step], graph: Graph, root: nn.Module, users: dict[int, list[int]]) -> list[Step]:
    """Join consecutive functions, such as an activation and a batch norm, into one table."""
    memory = _Memory(steps, graph, root)
    by_output = {step.output: step for step in steps}
    gone: set[int] = set()
    for step in steps:
        before = by_output[step.inputs[0]] if isinstance(step.operator, Lookup) else step
        if not isinstance(before.operator, Lookup) or before is step or users[before.output] != [step.nodes[0]]:
            continue
        if memory.is_written_between(before, step):
            continue
        assert isinstance(step.operator, Lookup)
        before.operator = Lookup(per_channel=before.operator.per_channel or step.operator.per_channel)
        before.nodes = (*before.nodes, *step.nodes)
        by_output[before.output] = before
        gone.add(id(step))
    return sorted((step for step in steps if id(step) not in gone), key=lambda step: step.output)


class _Memory:
    """Which values of a graph may lie in the memory of another, and who changes it in place."""

    def __init__(self, steps: list[Step], graph: Graph, root: nn.Module) -> None:
        self._graph, self._root = graph, root
        self._step_of = {node: step for step in steps for node in step.nodes}
        self._writing = [node for node in graph.nodes if node.writes or self._says_it_writes(node)]

    def is_written_between(self, before: Step, step: Step) -> bool:
        """Whether an input of `before` is changed in place before `step`, so that a joined step would read it too late.

        It may be changed through a view: `y = layer(x); x[:4].add_(1); torch.relu(y)`.
        """
        between = [node for node in self._writing if before.nodes[0] < node.index < step.nodes[0]]
        if not between or any(node.writes for node in between):
            return bool(between)
        read = self._origins(before.inputs)
        return any(read & self._origins(node.refs[:1]) for node in between)

    def _says_it_writes(self, node: Node) -> bool:
        module = attribute(self._root, node.target) if node.kind is Kind.MODULE else None
        return says_it_writes(node.kind, node.target, node.kwargs, module)

    def _origins(self, values: Iterable[int]) -> set[int]:
        """The inputs and integer steps whose memory the values may have; of float calls nobody says what is a view."""
        found, seen, waiting = set(), set(values), list(values)
        while waiting:
            node = self._graph.nodes[waiting.pop()]
            step = self._step_of.get(node.index)
            passes = step is None or isinstance(step.operator, (Float, View, Identity)) or self._says_it_writes(node)
            refs = node.refs if passes else []
            if not refs:
                found.add(node.index)
            waiting += [one for one in refs if one not in seen]
            seen.update(refs)
        return found


def _takes_batch_norm(before: Step, graph: Graph, again: set[int]) -> bool:
    known = before.operator
    assert isinstance(known, Weighted)
    if not _is_folded_into(before, again) or known.is_folded or known.clamp is not None:
        return False
    meta = graph.nodes[before.output].meta
    return meta is not None and (not isinstance(known, Linear) or len(meta.shape) == 2)


def _takes_affine(before: Step, affine: Affine, graph: Graph, again: set[int]) -> bool:
    """Whether a number per channel may be folded into the weight; after a batch norm or a clamp it may not."""
    known = before.operator
    assert isinstance(known, Weighted)
    if not _is_folded_into(before, again) or known.batch_norm is not None or known.clamp is not None:
        return False
    meta = graph.nodes[before.output].meta
    fits = affine.axis in (0, known.input_channel_axis)  # channels of input and output lie along the same axis
    return meta is not None and (fits or (len(meta.shape) == 2 and isinstance(known, Linear)))


def _is_folded_into(before: Step, again: set[int]) -> bool:
    """Whether a step has a weight to fold into, and no other call needs it unfolded."""
    return isinstance(before.operator, Weighted) and before.nodes[0] not in again


def _called_again(graph: Graph, root: nn.Module) -> set[int]:
    """The nodes that call a module which another node calls too, under this name or another."""
    callers: dict[int, list[int]] = {}
    for node in graph.nodes:
        if node.kind is Kind.MODULE:
            callers.setdefault(id(attribute(root, node.target)), []).append(node.index)
    return {index for nodes in callers.values() if len(nodes) > 1 for index in nodes}
