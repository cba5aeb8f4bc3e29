"""Parity: whether the int8 model gives the values that its float simulation predicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibrate.batches import Caller, check_batches
from quant.copying import copy_model
from quant.devices import device_of
from quant.graph import Graph
from quant.nn.embedding import Embedding, EmbeddingBag
from quant.ops.step import is_recurrent
from quant.runtime.arguments import clone, rebuilt
from quant.runtime.binding import bound_values
from quant.runtime.instructions import Conversion
from quant.runtime.layers.recurrent import StaticCell, StaticRecurrent
from quant.runtime.layers.static_module import StaticQuantModule
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.names import child_of, full_name
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.runtime.values import Held
from quant.static.kept_graph import graph_of
from quant.static.runner import GraphRunner, runners, unwrapped
from quant.static.signature import outline
from quant.step_parity import (
    StepParity,
    called_module,
    recurrent_layer,
    recurrent_parity,
    step_parity,
    table_parity,
)
from quant.submodule_calls import Call, calls_of, evaluating


@dataclass(frozen=True)
class Parity:
    """Every integer step, the one with the most unequal values first. Printable, iterable, and JSON through `to_dict`.

    Attributes:
        outside: modules with calls that no captured program stands for. They are not compared: the user's forward runs
            them, with a range per call.
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
        """The share of all uint8 values that differ."""
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
    """Compare each integer step with its float simulation on the step's own integer inputs.

    So differences do not propagate from step to step. Requantising rounds a float32 product, simulation a float32
    sum: only values on the edge between two integers may differ. A recurrent layer is compared by the same rule at
    every time step, on the int8 layer's input and state there, and an embedding's rows with the float table's, rounded.
    Other layers that convert makes dynamic are not compared: they round their inputs by ranges of each call.

    Args:
        prepared: calibrated, from `prepare`, or trained, from `prepare_qat`, on any device; run in eval mode, and left
            in its own.
        converted: from `convert(prepared)`.
        batches: as for `quant.calibrate.run`.

    Raises:
        ValueError: the two models do not belong together, or `batches` is empty.
        TypeError: `batches` is a single batch.
    """
    prepared = unwrapped(prepared)
    if runners(prepared) and device_of(prepared) != torch.device("cpu"):
        prepared = copy_model(prepared).cpu()
    units = {path: runner for path, runner in runners(prepared).items() if _converted(converted, path)}
    if not units:
        raise ValueError("quant.parity: expected a model from quant.prepare and its conversion by quant.convert")
    check_batches(batches, "quant.parity")
    caller = Caller(prepared)
    steps: dict[str, StepParity] = {}
    outside: set[str] = set()
    with torch.no_grad(), evaluating(prepared, converted), calls_of(converted, units) as calls:
        for batch in batches:
            # Copies, which a forward may write into, where the integers are computed.
            args, kwargs = rebuilt(caller.arguments(batch), lambda x: clone(x).cpu() if type(x) is Tensor else x)
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
    return isinstance(module, (StaticLayer, StaticQuantModule, StaticRecurrent, StaticCell)) or isinstance(
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
    """The runner with the program of a converted module's graph; convert dropped programs that saw no data."""
    if not first.others:
        return first
    wanted = outline(graph)
    runners = first.programs()
    return next((one for one in runners if outline(one.graph) == wanted), None)


def _steps(path: str, runner: GraphRunner, unit: nn.Module, held: Held, computed: set[int]) -> Iterator[StepParity]:
    """The integer steps of one call whose values are known.

    Args:
        computed: values of the graph that integer steps compute.
    """
    for step in runner.fused.steps:
        name = full_name(path, step.name)
        # Unread values are not computed, and convert may leave layers float.
        if step.integer and step.output in computed:
            if is_recurrent(step):
                yield from recurrent_parity(name, step, runner, recurrent_layer(unit, step, runner), held)
            else:
                yield step_parity(name, step, runner, held)
        elif isinstance(table := called_module(step, runner.graph, unit), (Embedding, EmbeddingBag)):
            yield table_parity(name, step, runner, table, held)


def _held_by_layer(layer: nn.Module, runner: GraphRunner, *args: Any, **kwargs: Any) -> Held:
    """The values of a captured module that is a single layer."""
    [step] = [step for step in runner.fused.steps if step.integer]
    if not isinstance(layer, (StaticLayer, StaticQuantModule)):
        values = bound_values(runner.expected, runner.root, args, kwargs)
        result = layer(*args, **kwargs)
        read = step.inputs[0]
        q_x = runner.qparams(runner.fused.slot_of[read]).quantize(values[read])
        output = result[0] if step.output != step.nodes[0] else result
        return Held({**values, step.output: output}, {read: q_x})
    [read] = step.inputs
    if step.reads_two_bytes:
        assert isinstance(layer, StaticLayer)
        [real] = (*args, *kwargs.values())
        output = {step.output: layer.compute(real, layer.own)}
        return Held({read: real}, output) if runner.fused.emits_integers(step) else Held({read: real, **output})
    q_x = runner.qparams(runner.fused.slot_of[read]).quantize(*args, **kwargs)
    output = {step.output: layer.compute(q_x, layer.own)}
    return Held({}, {read: q_x, **output}) if runner.fused.emits_integers(step) else Held(output, {read: q_x})
