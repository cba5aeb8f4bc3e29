"""The outputs of a calibrated model by many recipes, computed again only behind what a recipe changes.

All values of a call are computed once in float and once as the integers will be. From these on, a model in which one
layer is int8, or all but one, costs the steps that depend on this layer, whatever stands before it or beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.fusion.fuse import fuse_again
from quant.fusion.recognised_steps import recognised_calls
from quant.graph import Kind, Node, arguments_of, evaluate
from quant.ops.operator import Weighted
from quant.ops.step import Step
from quant.recipe import Recipe
from quant.runtime.arguments import copied
from quant.runtime.binding import bound_values
from quant.runtime.names import attribute, full_name
from quant.runtime.outputs import finished
from quant.runtime.trees import Ref, leaves, map_leaves
from quant.static.dynamic_fallback import without_runner
from quant.static.prepared import record_of
from quant.static.runner import GraphRunner, output_of, rounding, runners
from quant.static.step_simulation import RoundedLayer
from quant.variants import module_name

Values = dict[int, Any]


class OtherSteps(Exception):
    """A recipe joins calls to steps that the calibrated model does not have."""


@dataclass(frozen=True)
class FormStep:
    """A step of a form.

    Attributes:
        step: of the calibrated model's fused graph where it is one of integers.
        stand_in: computes it, of a layer that is dynamic.
        integer: whether it computes in integers.
        emits: whether its output is uint8.
        reads: the values that its calls read from others.
    """

    step: Step
    stand_in: nn.Module | None
    integer: bool
    emits: bool
    reads: frozenset[int]

    def computes_as(self, other: FormStep | None) -> bool:
        """Whether the same inputs give the same value in another form."""
        if other is None or self.step.nodes != other.step.nodes:
            return False
        return (self.integer, self.emits, self.stand_in) == (other.integer, other.emits, other.stand_in)


@dataclass(frozen=True)
class Form:
    """A model by one recipe.

    Attributes:
        steps: by the value that each computes, in order.
        emitted: the values that are uint8.
        spent: by step, the values that no later one reads.
    """

    steps: dict[int, FormStep]
    emitted: frozenset[int]
    spent: dict[int, tuple[int, ...]]


class Sweep:
    """A calibrated model that is one graph, whose calls are computed by any recipe that quantises no more.

    Attributes:
        runner: of the model.
        stand_ins: the dynamic int8 forms of layers without ranges, by name.
        kept_float: names of layers that convert leaves float, and why.
        floats: the float model.
        integers: the model by the recipe that it was calibrated with.
    """

    def __init__(
        self, runner: GraphRunner, recipe: Recipe, stand_ins: Mapping[str, nn.Module], kept_float: Mapping[str, str]
    ) -> None:
        self.runner, self.graph, self.root = runner, runner.graph, runner.root
        self.stand_ins, self.kept_float = stand_ins, dict(kept_float)
        runner.known = {}  # calibration is over: a range is chosen once
        self._own = {step.nodes: step for step in runner.fused.steps if step.integer}
        self._rounding = {value: rounding(runner.qparams(slot)) for value, slot in runner.fused.slot_of.items()}
        self._layers: dict[tuple[int, ...], RoundedLayer | None] = {}
        self._calls = recognised_calls(self.graph, without_runner(self.root))
        self._in_place: set[int] = set()
        self.floats, self.integers = self.form(Recipe(default=None)), self.form(recipe)

    def form(self, recipe: Recipe) -> Form:
        """The model by a recipe.

        Raises:
            OtherSteps: the model that it makes has steps of integers that the calibrated one has not.
        """
        fused = fuse_again(self.runner.fused, without_runner(self.root), recipe, self.kept_float, self._calls)
        steps = {}
        for step in fused.steps:
            if self.graph.nodes[step.output].kind is not Kind.INPUT:
                known = self._own.get(step.nodes) if step.integer else step
                if known is None:
                    raise OtherSteps(f"{step.name}: the calibrated model computes it with other calls")
                refs = {ref for index in step.nodes for ref in self.graph.nodes[index].refs}
                reads = frozenset(refs.union(step.inputs) - set(step.nodes))
                stand_in = None if step.integer else self._stand_in(step, recipe)
                steps[step.output] = FormStep(known, stand_in, step.integer, fused.emits_integers(step), reads)
        return Form(steps, frozenset(value for value, one in steps.items() if one.emits), self._spent(steps))

    def _spent(self, steps: Mapping[int, FormStep]) -> dict[int, tuple[int, ...]]:
        """By step, the values that neither a later step nor the model's output reads."""
        read = {leaf.index for leaf in leaves(self.graph.output) if isinstance(leaf, Ref)}
        spent = {}
        for output, one in reversed(list(steps.items())):
            last = one.reads.union(one.step.nodes) - read
            spent[output] = tuple(last)
            read |= last
        return spent

    def _stand_in(self, step: Step, recipe: Recipe) -> nn.Module | None:
        """What computes a dynamic layer's step, if the recipe quantises the layer."""
        inner = module_name(step, self.runner)
        name = full_name(self.graph.path, inner)
        if name not in self.stand_ins or self.graph.nodes[step.nodes[0]].kind is not Kind.MODULE:
            return None
        chosen = recipe.resolve(name, attribute(self.root, inner))[0]
        return None if chosen is None else self.stand_ins[name]

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
        """The values that a call gives.

        Raises:
            CaptureMismatch: it is none that the graph stands for.
        """
        return bound_values(self.runner.expected, self.root, args, kwargs)

    def values(self, inputs: Values, form: Form) -> Values:
        """Every value of a call."""
        values = dict(inputs)
        for one in form.steps.values():
            values.update(self._computed(one, form, values.__getitem__))
        return values

    def output(self, values: Values) -> Any:
        """The model's output."""
        return output_of(self.graph, values)

    def again(self, known: Values, known_form: Form, form: Form) -> Any:
        """The output of a form, from the values of another one for the same call."""
        own: Values = {}

        def value(index: int) -> Any:
            return own[index] if index in own else known[index]

        for output, one in form.steps.items():
            if not (one.computes_as(known_form.steps.get(output)) and own.keys().isdisjoint(one.reads)):
                own.update(self._computed(one, form, value))
                for index in form.spent[output]:  # the next step writes into memory that a cache still holds
                    own.pop(index, None)
        return self.output({**known, **own})

    def finished(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output as the caller of the model gets it."""
        return finished(output, self.root, args, kwargs)

    def note_writes(self, inputs: Values) -> bool:
        """Find the calls that write into what they read, which get copies from now on.

        Returns:
            whether that is right: nobody reads later what was written.
        """
        users, values = self.graph.users(), dict(inputs)
        for node in self.graph.nodes:
            if node.kind is Kind.INPUT:
                continue
            read = [one for ref in node.refs for one in leaves(values[ref]) if isinstance(one, Tensor)]
            before = [one._version for one in read]
            values[node.index] = evaluate(node, self.root, values.__getitem__)
            written = [one for one, version in zip(read, before, strict=True) if one._version != version]
            if not written:
                continue
            self._in_place.add(node.index)
            memory = {_memory(one) for one in written}
            for index, value in values.items():
                shared = any(isinstance(one, Tensor) and _memory(one) in memory for one in leaves(value))
                if shared and index != node.index and any(user > node.index for user in users[index]):
                    return False
        return True

    def _computed(self, one: FormStep, form: Form, value: Callable[[int], Any]) -> Values:
        step = one.step
        if one.stand_in is not None:
            args, kwargs = arguments_of(self.graph.nodes[step.nodes[0]], self.root, value)
            return {step.output: one.stand_in(*args, **kwargs)}
        if not one.integer:
            return self._in_float(step, value)
        rounded = set() if step.reads_two_bytes else set(step.inputs) & self._rounding.keys()
        read = {
            index: value(index) if index in form.emitted else map_leaves(self._rounding[index], value(index))
            for index in rounded
        }

        def seen(index: int) -> Any:
            return read[index] if index in read else value(index)

        result = self.runner.simulated(step, seen, layer=self._layer(step))
        if one.emits:
            result[step.output] = map_leaves(self._rounding[step.output], result[step.output])
        return result

    def _layer(self, step: Step) -> RoundedLayer | None:
        """The rounded weight and bias of a weighted step, which are the same in all forms; None of other steps."""
        if step.nodes not in self._layers:
            self._layers[step.nodes] = self.runner.rounded_layer(step) if isinstance(step.operator, Weighted) else None
        return self._layers[step.nodes]

    def _in_float(self, step: Step, value: Callable[[int], Any]) -> Values:
        own: Values = {}
        for index in step.nodes:
            own[index] = self._called(self.graph.nodes[index], lambda i: own[i] if i in own else value(i))
        return own

    def _called(self, node: Node, value: Callable[[int], Any]) -> Any:
        if node.index in self._in_place:
            return evaluate(node, self.root, lambda index: copied(value(index)))
        return evaluate(node, self.root, value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def sole_runner(prepared: nn.Module) -> GraphRunner | None:
    """The runner of a model that is one graph with one program, without islands; None for others."""
    info = record_of(prepared)
    every = runners(prepared)
    first = every.get("")
    single = len(every) == 1 and first is not None and not len(first.others) and not info.islands
    return first if single and first is not None and not first.graph.writes else None
