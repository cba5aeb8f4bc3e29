"""How calibration goes through a graph: node by node in float, with each value shown to those who watch it.

What nobody but a convolution's own batch norm and clamp reads is not made: they are computed where the convolution's
output lies, in the pass over memory in which the observers look at the result (`observers/one_pass.py`). The numbers
are those of the float model, to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everybody

from quant.dead_calls import last_uses
from quant.fusion.fused_graph import FusedGraph
from quant.graph import Graph, Kind, Node, arguments_of, evaluate
from quant.kernels.at_fork import Turns
from quant.observers.one_pass import normalize_and_observe, observe_together
from quant.ops.conv import Conv
from quant.ops.step import Step, is_recurrent
from quant.runtime.module_calls import is_untouched
from quant.runtime.names import submodule
from quant.runtime.trees import Ref
from quant.static.float_convolutions import FloatConvolution, float_convolution_of
from quant.static.ranges import Ranges, key_of
from quant.static.recurrent_float import observe

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NO_CLAMP = (-torch.inf, torch.inf)

_observing = Turns()
"""Held while a value is shown: threads may calibrate one model, and an observer reads what it writes."""


@dataclass(frozen=True)
class Tail:
    """A batch norm, a clamp, or both behind a convolution.

    Attributes:
        conv, norm, activation: their nodes.
        clamp: (low, high) of the activation, infinite where there is none.
    """

    conv: Node
    norm: Node | None
    activation: Node | None
    clamp: tuple[float, float]

    @functools.cached_property
    def output(self) -> int:
        """The value that they give."""
        last = self.activation or self.norm
        assert last is not None
        return last.index

    @functools.cached_property
    def module_calls(self) -> tuple[Node, ...]:
        """Those among them that call modules."""
        nodes = (self.conv, self.norm, self.activation)
        return tuple(one for one in nodes if one is not None and one.kind is Kind.MODULE)

    def observed(self, y: Any, root: nn.Module, observer: nn.Module, means: Sequence[nn.Module]) -> bool:
        """Compute the tail in the convolution's output and show it; False, with nothing done, where torch has to.

        Hooks would be told of calls that nobody makes, and gradients and modes of torch see functions one by one.
        """
        if type(y) is not Tensor or torch.is_grad_enabled() or _is_watched():
            return False
        norm = None
        for node in self.module_calls:
            module = submodule(root, node.target)
            if not is_untouched(module):
                return False
            if node is self.norm:
                norm = module
        return (norm is None or type(norm) in NORMS) and normalize_and_observe(y, norm, self.clamp, observer, means)


def tails_of(fused: FusedGraph, observed: Collection[int], also_watched: Collection[int]) -> dict[int, Tail]:
    """The tails of a graph by their convolutions.

    Args:
        observed: values that have an observer; others need no pass over memory.
        also_watched: values that somebody looks at besides.
    """
    tails = {}
    users = fused.graph.users()
    for step in fused.steps:
        tail = _tail_of(step, fused.graph)
        if tail is None or tail.output not in observed:
            continue
        inner = step.nodes[:-1]
        alone = all(users[one] == [one + 1] for one in inner)
        if alone and not any(one in observed or one in also_watched for one in inner):
            tails[inner[0]] = tail
    return tails


def _tail_of(step: Step, graph: Graph) -> Tail | None:
    operator = step.operator
    if not isinstance(operator, Conv) or len(step.nodes) < 2 or operator.affine:
        return None
    conv, *rest = (graph.nodes[index] for index in step.nodes)
    norm = rest.pop(0) if rest and rest[0].index == operator.batch_norm else None
    activation = rest.pop(0) if rest and operator.clamp is not None else None
    if rest or (norm is None) != (operator.batch_norm is None) or (activation is None) != (operator.clamp is None):
        return None
    if conv.kind not in (Kind.MODULE, Kind.FUNCTION) or any(one and not _is_plain(one) for one in (norm, activation)):
        return None
    if norm is not None and norm.kind is not Kind.MODULE:
        return None
    return Tail(conv, norm, activation, operator.clamp or NO_CLAMP)


def _is_plain(node: Node) -> bool:
    """Whether the node is a call of the value before it."""
    return bool(node.args) and node.args[0] == Ref(node.index - 1) and not node.writes and node.meta is not None


def _is_watched() -> bool:
    """Whether a mode of torch, or hooks of all modules, are told of each call."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or everybody._global_forward_hooks
        or everybody._global_forward_pre_hooks
    )


@dataclass(frozen=True)
class Visit:
    """What calibration does at a node.

    Attributes:
        node: the node.
        recurrent: the step of a recurrent layer, whose states are observed too.
        observer, means, columns: the keys of those who watch its value.
        tail: of a convolution.
        convolution: of floats, where there is a choice of how it is computed.
        dead: values that nobody reads any more.
    """

    node: Node
    recurrent: Step | None = None
    observer: str | None = None
    means: tuple[str, ...] = ()
    columns: str | None = None
    tail: Tail | None = None
    convolution: FloatConvolution | None = None
    dead: tuple[int, ...] = ()


class Observation:
    """Goes through a graph in float and shows its values to those who watch them.

    Attributes:
        ranges: the observers, and the graph's module.
        visits: what is done at each node, in order.
    """

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self.visits = _visits_of(ranges)
        self._observers, self._averages = ranges.observers, ranges.means

    def run(self, values: dict[int, Any]) -> None:
        """Compute the values of a call, given its inputs; those that nobody reads any more are dropped."""
        root, computed = self.ranges.root, -1  # the last value that a tail has brought
        for visit in self.visits:
            index = visit.node.index
            if index > computed and visit.node.kind is not Kind.INPUT:
                values[index] = self._computed(visit, root, values)
            with _observing:
                if index > computed:
                    if visit.recurrent is not None:
                        self._show_states(visit.node, visit.recurrent, values)
                    if visit.tail is not None and self._compute_tail(visit.tail, values):
                        computed = visit.tail.output
                    else:
                        self._show(visit, values)
                if visit.columns is not None:
                    self._observers[visit.columns](values[index])
            for dead in visit.dead:
                values.pop(dead, None)  # a tail leaves out the values between

    def _computed(self, visit: Visit, root: nn.Module, values: dict[int, Any]) -> Any:
        if visit.convolution is not None and not _is_watched():
            y = visit.convolution(root, values[visit.node.args[0].index])
            if y is not None:
                return y
        return evaluate(visit.node, root, values.__getitem__)

    def _compute_tail(self, tail: Tail, values: dict[int, Any]) -> bool:
        watching = self.visits[tail.output]
        assert watching.observer is not None
        observer = self._observers[watching.observer]
        if not tail.observed(values[tail.conv.index], self.ranges.root, observer, self._means(watching)):
            return False
        values[tail.output] = values.pop(tail.conv.index)
        return True

    def _show(self, visit: Visit, values: dict[int, Any]) -> None:
        """Show a value to its observer and to the means of its channels."""
        index, means = visit.node.index, self._means(visit)
        if visit.observer is not None:
            observer, value = self._observers[visit.observer], values[index]
            if isinstance(value, Tensor) and observe_together(value, observer, means):
                return
            values[index] = observer(value)
        for mean in means:
            mean(values[index])

    def _means(self, visit: Visit) -> list[nn.Module]:
        return [self._averages[key] for key in visit.means]

    def _show_states(self, node: Node, step: Step, values: dict[int, Any]) -> None:
        ranges = self.ranges
        slots = ranges.fused.inner_slots(step)
        args, kwargs = arguments_of(node, ranges.root, values.__getitem__)
        module = submodule(ranges.root, node.target)
        with torch.no_grad():
            observe(module, args, kwargs, values[node.index], lambda name, x: ranges.observer(slots[name])(x))


def _visits_of(ranges: Ranges) -> list[Visit]:
    fused = ranges.fused
    observers = {value: key_of(slot.name) for slot in fused.slots.values() for value in slot.observed}
    means: dict[int, list[str]] = {}
    for step in ranges.corrected():
        if key_of(step.name) in ranges.means:  # a later fusion may have fewer calls of a layer
            means.setdefault(step.inputs[0], []).append(key_of(step.name))
    recurrent = {step.nodes[0]: step for step in fused.steps if is_recurrent(step)}
    operators = {step.nodes[0]: step.operator for step in fused.steps}
    tails = tails_of(fused, observers, {*means, *ranges.columns, *recurrent})
    dead = last_uses(fused.graph)
    return [
        Visit(
            node,
            recurrent.get(node.index),
            observers.get(node.index),
            tuple(means.get(node.index, ())),
            ranges.columns.get(node.index),
            tails.get(node.index),
            float_convolution_of(node, operators.get(node.index), ranges.root),
            tuple(dead.get(node.index, ())),
        )
        for node in fused.graph.nodes
    ]
