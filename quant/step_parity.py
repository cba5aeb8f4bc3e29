"""Parity of single steps: the int8 result against the simulation on the same integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quant.graph import Graph, Kind, arguments_of, evaluate
from quant.kernels import QParams
from quant.nn.embedding import Embedding, EmbeddingBag
from quant.ops.recurrent import Sequence, product_range, state_range
from quant.ops.step import Step
from quant.qat.dynamic import call_rounded
from quant.recipe import QConfig
from quant.runtime.layers.recurrent import StaticCell, StaticRecurrent
from quant.runtime.names import attribute
from quant.runtime.trees import leaves
from quant.runtime.values import Held
from quant.static.runner import GraphRunner, rounding
from quant.static.step_simulation import recurrent_call, simulated_layer
from quant.time_steps import TimeSteps, time_steps

FLOAT_TOLERANCE = 1e-4
"""The difference that two summation orders of float32 products may cause, relative to the largest sum."""


@dataclass(frozen=True)
class StepParity:
    """The difference between one step of the int8 model and its simulation on the same integers.

    The states of a recurrent layer are compared at every time step, each computed from the int8 layer's own previous
    state: they are steps named "layer.h_l0", one for each layer inside.

    Attributes:
        name: of the step.
        worst: the largest difference, in steps of the output's scale; for a float output, relative to its maximum.
        unequal: the share of values that differ at all; 0.0 for a float output.
        values: the number of values compared.
        integer: whether the output is uint8.
        unrounded: the largest difference of a recurrent layer's states before rounding, relative to the largest state;
            with a projection, of its cell states. 0.0 for other steps.
        whole: the largest difference of the states, in steps, where the simulation runs whole sequences on its own
            states; None for other steps. It has no limit, as a difference of one step is fed back and grows.
    """

    name: str
    worst: float
    unequal: float
    values: int
    integer: bool = True
    unrounded: float = 0.0
    whole: float | None = None

    @property
    def holds(self) -> bool:
        """Whether simulation and integers agree: within one step, or, in float, within 1e-4."""
        return self.worst <= (1 if self.integer else FLOAT_TOLERANCE) and self.unrounded <= FLOAT_TOLERANCE

    def and_(self, other: StepParity) -> StepParity:
        """Combine two results of the same step, over batches, calls, or directions."""
        values = self.values + other.values
        unequal = (self.unequal * self.values + other.unequal * other.values) / max(values, 1)
        whole = max((one for one in (self.whole, other.whole) if one is not None), default=None)
        worst, unrounded = max(self.worst, other.worst), max(self.unrounded, other.unrounded)
        return StepParity(self.name, worst, unequal, values, self.integer, unrounded, whole)

    def difference(self) -> str:
        """The largest difference, as text."""
        if not self.integer:
            return f"{self.worst:.1e} (float output)"
        steps = f"{self.worst:.0f} steps"
        if self.unrounded > FLOAT_TOLERANCE:
            steps += f", {self.unrounded:.1e} before rounding"
        return steps if self.whole is None else f"{steps} at a time step ({self.whole:.0f} over whole sequences)"


def step_parity(name: str, step: Step, runner: GraphRunner, held: Held) -> StepParity:
    expected = runner.simulated(step, _reals(runner, held, unrounded=step.reads_two_bytes))[step.output]
    if not isinstance(expected, Tensor) or not expected.numel():
        return StepParity(name, 0.0, 0.0, 0)
    # In the converted model the readers of this step may be float.
    if not runner.fused.emits_integers(step) or step.output not in held.integers:
        return StepParity(name, _relative(held.reals[step.output], expected), 0.0, expected.numel(), False)
    q_expected = runner.qparams(runner.fused.slot_of[step.output]).quantize(expected)
    return _integers(name, held.integers[step.output], q_expected)


def called_module(step: Step, graph: Graph, unit: nn.Module) -> nn.Module | None:
    """The module of the converted unit that a step calls."""
    node = graph.nodes[step.nodes[0]]
    return unit.get_submodule(node.target) if node.kind is Kind.MODULE and node.target else None


def table_parity(name: str, step: Step, runner: GraphRunner, table: Embedding | EmbeddingBag, held: Held) -> StepParity:
    """Compare rows of a packed table, or their sums, with those of the float table, rounded as in training."""
    node = runner.graph.nodes[step.nodes[0]]
    args, kwargs = arguments_of(node, runner.root, held.reals.__getitem__)
    rounding = QConfig(weight_bits=table.bits)
    expected = call_rounded(attribute(runner.root, node.target), rounding, args, kwargs)
    return StepParity(name, _relative(held.reals[step.output], expected), 0.0, expected.numel(), False)


def _integers(name: str, q_values: Tensor, expected: Tensor) -> StepParity:
    apart = (q_values.int() - expected.int()).abs()
    if not apart.numel():
        return StepParity(name, 0.0, 0.0, 0)
    return StepParity(name, float(apart.max()), float((apart > 0).double().mean()), apart.numel())


def _relative(values: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; inf where one of them is not finite."""
    if not expected.numel():
        return 0.0
    apart = (values - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return float(apart.nan_to_num(nan=torch.inf))


def recurrent_layer(unit: nn.Module, step: Step, runner: GraphRunner) -> StaticRecurrent | StaticCell:
    if isinstance(unit, (StaticRecurrent, StaticCell)):
        return unit
    layer = unit.get_submodule(runner.graph.nodes[step.nodes[0]].target)
    assert isinstance(layer, (StaticRecurrent, StaticCell))
    return layer


def recurrent_parity(
    name: str, step: Step, runner: GraphRunner, layer: StaticRecurrent | StaticCell, held: Held
) -> Iterator[StepParity]:
    """Compare the states of every layer inside at every time step, and the last layer's output in the model's call."""
    fused, node = runner.fused, runner.graph.nodes[step.nodes[0]]
    known = {one: runner.qparams(slot) for one, slot in fused.inner_slots(step).items()}
    names = [state_range(index) for index in range(layer.num_layers if isinstance(layer, StaticRecurrent) else 1)]
    states = [known[one] for one in names]
    simulate = simulated_layer(step, runner.graph, runner.root, {one: rounding(known[one]) for one in known})
    reads = [runner.qparams(fused.slot_of[step.inputs[0]]), *states]

    def given_to(index: int) -> Any:
        return (held.integers if index in step.inputs else held.reals)[index]

    def carried(index: int) -> Any:
        return held.reals[index] if index in held.reals else held.integers[index]

    call = recurrent_call(node, runner.root, given_to, carried)
    steps, output = time_steps(layer, *call, simulate, reads)
    for one in steps:
        projected = product_range(one.layer) in known
        yield _states(f"{name}.{names[one.layer]}", one, states[one.layer], projected=projected)
    emits, last, name = fused.emits_integers(step), states[-1], f"{name}.{names[-1]}"
    result = _first((held.integers if emits else held.reals)[step.output])
    q_given = result if emits else last.quantize(result)
    yield replace(_integers(name, q_given, last.quantize(_first(output))), values=0)
    if isinstance(step.operator, Sequence):
        whole = _first(runner.simulated(step, _reals(runner, held))[step.output])
        yield StepParity(name, 0.0, 0.0, 0, whole=_integers("", q_given, last.quantize(whole)).worst)


def _states(name: str, step: TimeSteps, qparams: QParams, *, projected: bool) -> StepParity:
    """Compare the states of one layer and direction.

    The input of a projection is rounded too, and may be rounded to either side; the states after it then differ by more
    than float sums do, and are compared as integers only.
    """
    unrounded = [_relative(step.cells, step.expected_cells)]
    unrounded += [] if projected else [_relative(step.states, step.expected)]
    return replace(_integers(name, step.q_states, qparams.quantize(step.expected)), unrounded=max(unrounded))


def _first(tree: Any) -> Tensor:
    first: Tensor = next(leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))
    return first


def _real(qparams: QParams, integers: Tensor) -> Tensor:
    """The dequantised integers, contiguous: they may be channels last where the user's own values could be viewed."""
    return qparams.dequantize(integers).contiguous()


def _reals(runner: GraphRunner, held: Held, *, unrounded: bool = False) -> Callable[[int], Any]:
    """A function that gives a node's real value: its integers dequantised, where it has any and not `unrounded`.

    Values that follow from parameters alone are computed: they are in a look-up table, and no value of the program.
    """

    def value(index: int) -> Any:
        integers = None if unrounded and index in held.reals else held.integers.get(index)
        if integers is None and index not in held.reals:
            return evaluate(runner.graph.nodes[index], runner.root, value)
        if integers is None:
            return held.reals[index]
        qparams = runner.qparams(runner.fused.slot_of[index])
        if isinstance(integers, (tuple, list)):
            return type(integers)(_real(qparams, part) for part in integers)
        return _real(qparams, integers)

    return value
