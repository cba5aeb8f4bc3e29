"""Int8 against its own simulation: does the real arithmetic give what the fake-quantised float model said?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibrate.batches import Caller, check_batches
from quant.compare import Call, calls_of, evaluating
from quant.graph import Graph, Kind, arguments_of, evaluate
from quant.kernels import QParams
from quant.nn.embedding import Embedding, EmbeddingBag
from quant.ops.recurrent import Sequence, product_range, state_range
from quant.ops.step import Step, is_recurrent
from quant.qat.dynamic import call_rounded
from quant.recipe import QConfig
from quant.runtime.arguments import copied
from quant.runtime.binding import bound_values
from quant.runtime.instructions import Conversion
from quant.runtime.layers.recurrent import StaticCell, StaticRecurrent
from quant.runtime.layers.recurrent_walk import call_of
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.names import attribute, child_of, full_name
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.runtime.trees import leaves
from quant.runtime.values import Held
from quant.static.kept_graph import graph_of
from quant.static.runner import GraphRunner, rounding, runners, unwrapped
from quant.static.signature import outline
from quant.static.step_simulation import simulated_layer
from quant.time_steps import TimeSteps, time_steps

FLOAT_TOLERANCE = 1e-4
"""What two orders of adding float32 products may differ by, relative to the largest sum."""


@dataclass(frozen=True)
class StepParity:
    """How one step of the int8 model differs from its simulation on the same integers.

    The states of a recurrent layer are compared at every time step, each from the int8 layer's own state before: they
    are steps of the name "layer.h_l0", one for each layer inside.

    Attributes:
        name: of the step.
        worst: largest difference, in steps of the output's scale; of a float output, relative to its largest value.
        unequal: share of values that differ at all; 0.0 for a float output.
        values: how many there were.
        integer: whether the output is uint8.
        unrounded: largest difference of a recurrent layer's states before they are rounded, relative to the largest;
            of one with a projection, of its cell states. 0.0 for other steps.
        whole: largest difference of the states, in steps, where the simulation goes through whole sequences on its own
            states; None for other steps. It has no bar: a difference of one step is fed back and grows.
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
        """Whether simulation and integers agree: within one step, and in float within what float sums differ by."""
        return self.worst <= (1 if self.integer else FLOAT_TOLERANCE) and self.unrounded <= FLOAT_TOLERANCE

    def and_(self, other: StepParity) -> StepParity:
        """The same step over two batches, calls, or directions."""
        values = self.values + other.values
        unequal = (self.unequal * self.values + other.unequal * other.values) / max(values, 1)
        whole = max((one for one in (self.whole, other.whole) if one is not None), default=None)
        worst, unrounded = max(self.worst, other.worst), max(self.unrounded, other.unrounded)
        return StepParity(self.name, worst, unequal, values, self.integer, unrounded, whole)

    def difference(self) -> str:
        """The largest difference, for people."""
        if not self.integer:
            return f"{self.worst:.1e} (float output)"
        steps = f"{self.worst:.0f} steps"
        if self.unrounded > FLOAT_TOLERANCE:
            steps += f", {self.unrounded:.1e} before rounding"
        return steps if self.whole is None else f"{steps} at a time step ({self.whole:.0f} over whole sequences)"


@dataclass(frozen=True)
class Parity:
    """Every integer step, the one with most unequal values first. Printable, iterable, and JSON through `to_dict`.

    Attributes:
        outside: modules with calls that no captured program stands for, which are not compared: there the user's
            forward runs, with a range per call.
    """

    steps: tuple[StepParity, ...]
    outside: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[StepParity]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def holds(self) -> bool:
        """Whether every step agrees with its simulation."""
        return all(step.holds for step in self.steps)

    @property
    def unequal(self) -> float:
        """Share of all uint8 values that differ."""
        counted = [step for step in self.steps if step.integer]
        return sum(step.unequal * step.values for step in counted) / max(sum(step.values for step in counted), 1)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {"unequal": self.unequal, "holds": self.holds, "steps": [asdict(step) for step in self.steps],
                "outside": list(self.outside)}  # fmt: skip

    def __str__(self) -> str:
        width = max([len("step"), *(len(step.name) for step in self.steps)])
        lines = [f"{'step':{width}}      values  unequal  largest difference"]
        for step in self.steps:
            lines.append(f"{step.name:{width}}  {step.values:10}  {100 * step.unequal:6.3f}%  {step.difference()}")
        total = sum(step.values for step in self.steps if step.integer)
        lines.append(f"{'total':{width}}  {total:10}  {100 * self.unequal:6.3f}%  of uint8 values")
        if self.outside:
            lines.append(f"not compared: calls of {', '.join(self.outside)} that no captured program stands for")
        return "\n".join(lines)


def parity(prepared: nn.Module, converted: nn.Module, batches: Iterable[Any]) -> Parity:
    """Compare each integer step with its float simulation, given the integers that the step really got.

    So a difference is the step's own and none that came down to it. Requantising rounds a float32 product; simulation
    rounds a float32 sum: values on the edge between two integers may fall to either side, and no others. A recurrent
    layer is compared by the same rule at every time step, given the input and the state that the integers had there,
    and an embedding's rows with the float table's, rounded. Other layers that convert makes dynamic round their inputs
    by ranges of each call, which nothing simulates: they are not compared.

    Args:
        prepared: calibrated, from `prepare`, or trained, from `prepare_qat`; taken in eval mode, and left in its own.
        converted: from `convert(prepared)`.
        batches: as for `quant.calibrate.run`.

    Raises:
        ValueError: the two do not belong together, or no batch came.
        TypeError: `batches` is a single batch.
    """
    prepared = unwrapped(prepared)
    units = {path: runner for path, runner in runners(prepared).items() if _converted(converted, path)}
    if not units:
        raise ValueError("quant.parity: expected a model from quant.prepare and its conversion by quant.convert")
    check_batches(batches, "quant.parity")
    caller = Caller(prepared)
    steps: dict[str, StepParity] = {}
    outside: set[str] = set()
    with torch.no_grad(), evaluating(prepared, converted), calls_of(converted, units) as calls:
        for batch in batches:
            args, kwargs = copied(caller.arguments(batch))  # a forward may write into them
            calls.clear()
            converted(*args, **kwargs)
            for path, runner in units.items():
                for call in tuple(calls.get(path, ())):  # a layer that is called for its registers adds to them
                    one = _observed(path, runner, converted.get_submodule(path), call)
                    if one is None:
                        outside.add(path or "(root)")
                        continue
                    for step in one:
                        steps[step.name] = steps[step.name].and_(step) if step.name in steps else step
    if not steps and outside:
        raise ValueError(
            f"quant.parity: no program of {', '.join(sorted(outside))} stands for any of these batches; give batches "
            "like those that the model was prepared with"
        )
    if not steps:
        raise ValueError("quant.parity: no batch came, or no integer step ran; give at least one batch")
    return Parity(tuple(sorted(steps.values(), key=lambda step: (-step.unequal, -step.worst))), tuple(sorted(outside)))


def _converted(converted: nn.Module, path: str) -> bool:
    try:
        module = converted.get_submodule(path)
    except AttributeError:
        return False
    return isinstance(module, (StaticLayer, StaticRecurrent, StaticCell)) or isinstance(
        child_of(module, RESERVED), ProgramRunner
    )


def _observed(path: str, first: GraphRunner, unit: nn.Module, call: Call) -> list[StepParity] | None:
    """The steps of one call of a unit; None where it has no program for the call."""
    program = child_of(unit, RESERVED)
    if not isinstance(program, ProgramRunner):
        held = _held_by_layer(unit, first, *call.args, **call.kwargs)
        with first.settled():
            return list(_steps(path, first, unit, held, {*held.reals, *held.integers}))
    known = program.held_by(call.args, call.kwargs)
    runner = None if known is None else _prepared_as(first, graph_of(known[0]))
    if known is None or runner is None:
        return None
    one, held = known
    steps = [part for part in one.program.instructions if not (part.own or isinstance(part, Conversion))]
    computed = {one.program.values[part.out].node for part in steps}
    with runner.settled():
        return list(_steps(path, runner, unit, held, computed))


def _prepared_as(first: GraphRunner, graph: Graph) -> GraphRunner | None:
    """The runner whose program a graph of the converted module is: those to which no data came have none."""
    if not first.others:
        return first
    wanted = outline(graph)
    runners = first.programs()
    return next((one for one in runners if outline(one.graph) == wanted), None)


def _steps(path: str, runner: GraphRunner, unit: nn.Module, held: Held, computed: set[int]) -> Iterator[StepParity]:
    """Every integer step of one call, of a program whose values are known.

    Args:
        computed: values of the graph that steps of integers give.
    """
    for step in runner.fused.steps:
        name = full_name(path, step.name)
        # What nobody reads is not computed, and convert leaves layers in float that 8 bits cannot hold.
        if step.integer and step.output in computed:
            if is_recurrent(step):
                yield from _recurrent(name, step, runner, _recurrent_layer(unit, step, runner), held)
            else:
                yield _step(name, step, runner, held)
        elif isinstance(table := _called(step, runner.graph, unit), (Embedding, EmbeddingBag)):
            yield _table(name, step, runner, table, held)


def _held_by_layer(layer: nn.Module, runner: GraphRunner, *args: Any, **kwargs: Any) -> Held:
    """The values of a captured module that was nothing but one layer."""
    [step] = [step for step in runner.fused.steps if step.integer]
    if not isinstance(layer, StaticLayer):
        values = bound_values(runner.expected, runner.root, args, kwargs)
        result = layer(*args, **kwargs)
        read = step.inputs[0]
        q_x = runner.qparams(runner.fused.slot_of[read]).quantize(values[read])
        output = result[0] if step.output != step.nodes[0] else result
        return Held({**values, step.output: output}, {read: q_x})
    [read] = step.inputs
    q_x = runner.qparams(runner.fused.slot_of[read]).quantize(*args, **kwargs)
    output = {step.output: layer.compute(q_x, layer.own)}
    return Held({}, {read: q_x, **output}) if runner.fused.emits_integers(step) else Held(output, {read: q_x})


def _step(name: str, step: Step, runner: GraphRunner, held: Held) -> StepParity:
    expected = runner.simulated(step, _reals(runner, held))[step.output]
    if not isinstance(expected, Tensor) or not expected.numel():
        return StepParity(name, 0.0, 0.0, 0)
    # Convert may have left float what reads a step in integers here.
    if not runner.fused.emits_integers(step) or step.output not in held.integers:
        return StepParity(name, _relative(held.reals[step.output], expected), 0.0, expected.numel(), False)
    q_expected = runner.qparams(runner.fused.slot_of[step.output]).quantize(expected)
    return _integers(name, held.integers[step.output], q_expected)


def _called(step: Step, graph: Graph, unit: nn.Module) -> nn.Module | None:
    """The module of the converted unit that a step calls."""
    node = graph.nodes[step.nodes[0]]
    return unit.get_submodule(node.target) if node.kind is Kind.MODULE and node.target else None


def _table(name: str, step: Step, runner: GraphRunner, table: Embedding | EmbeddingBag, held: Held) -> StepParity:
    """Rows of a packed table, or their sums, beside those of the float table rounded as training rounds it."""
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


def _recurrent_layer(unit: nn.Module, step: Step, runner: GraphRunner) -> StaticRecurrent | StaticCell:
    if isinstance(unit, (StaticRecurrent, StaticCell)):
        return unit
    layer = unit.get_submodule(runner.graph.nodes[step.nodes[0]].target)
    assert isinstance(layer, (StaticRecurrent, StaticCell))
    return layer


def _recurrent(
    name: str, step: Step, runner: GraphRunner, layer: StaticRecurrent | StaticCell, held: Held
) -> Iterator[StepParity]:
    """The states of every layer inside, at every time step, and what the last layer gave in the model's own call."""
    fused, node = runner.fused, runner.graph.nodes[step.nodes[0]]
    known = {one: runner.qparams(slot) for one, slot in fused.inner_slots(step).items()}
    names = [state_range(index) for index in range(layer.num_layers if isinstance(layer, StaticRecurrent) else 1)]
    states = [known[one] for one in names]
    simulate = simulated_layer(step, runner.graph, runner.root, {one: rounding(known[one]) for one in known})
    reads = [runner.qparams(fused.slot_of[step.inputs[0]]), *states]

    def given_to(index: int) -> Any:
        return (held.integers if index in step.inputs else held.reals)[index]

    args, kwargs = arguments_of(node, runner.root, given_to)
    steps, output = time_steps(layer, *call_of(args, kwargs), simulate, reads)
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
    """The states of one layer and direction.

    What a projection reads is rounded too, and may fall to either side; the states after it differ by more than float
    sums do, and are compared as integers alone.
    """
    unrounded = [_relative(step.cells, step.expected_cells)]
    unrounded += [] if projected else [_relative(step.states, step.expected)]
    return replace(_integers(name, step.q_states, qparams.quantize(step.expected)), unrounded=max(unrounded))


def _first(tree: Any) -> Tensor:
    first: Tensor = next(leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))
    return first


def _real(qparams: QParams, integers: Tensor) -> Tensor:
    """Contiguous: integers may lie in channels last where the user's own values could be viewed."""
    return qparams.dequantize(integers).contiguous()


def _reals(runner: GraphRunner, held: Held) -> Callable[[int], Any]:
    """Gives the real value of a node: what its integers stand for, where it has any.

    What follows from parameters alone stands in a look-up table, and in no value of the program.
    """

    def value(index: int) -> Any:
        integers = held.integers.get(index)
        if integers is None and index not in held.reals:
            return evaluate(runner.graph.nodes[index], runner.root, value)
        if integers is None:
            return held.reals[index]
        qparams = runner.qparams(runner.fused.slot_of[index])
        if isinstance(integers, (tuple, list)):
            return type(integers)(_real(qparams, part) for part in integers)
        return _real(qparams, integers)

    return value
