"""Int8 against its own simulation: does the real arithmetic give what the fake-quantised float model said?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibrate.batches import Caller
from quant.compare import calls_of, refuse_single
from quant.fuse import Step, is_recurrent
from quant.graph import leaves
from quant.prepare import RESERVED, GraphRunner, bound_values, runners
from quant.static.layers import StaticLayer
from quant.static.program import ProgramRunner
from quant.static.rnn import StaticCell, StaticRecurrent

FLOAT_TOLERANCE = 1e-4
"""What two orders of adding float32 products may differ by, relative to the largest sum."""


@dataclass(frozen=True)
class StepParity:
    """How one step of the int8 model differs from its simulation on the same integers.

    Attributes:
        name: of the step.
        worst: largest difference, in steps of the output's scale; of a float output, relative to its largest value.
        unequal: share of values that differ at all; 0.0 for a float output.
        values: how many there were.
        integer: whether the output is uint8.
    """

    name: str
    worst: float
    unequal: float
    values: int
    integer: bool = True

    @property
    def holds(self) -> bool:
        """Whether simulation and integers agree: within one step, or, in float, within what float sums differ by."""
        return self.worst <= (1 if self.integer else FLOAT_TOLERANCE)

    def and_(self, other: StepParity) -> StepParity:
        """The same step over two batches."""
        values = self.values + other.values
        unequal = (self.unequal * self.values + other.unequal * other.values) / max(values, 1)
        return StepParity(self.name, max(self.worst, other.worst), unequal, values, self.integer)


@dataclass(frozen=True)
class Parity:
    """Every integer step, the one with most unequal values first. Printable, iterable, and JSON through `to_dict`."""

    steps: tuple[StepParity, ...]

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
        return {"unequal": self.unequal, "holds": self.holds, "steps": [asdict(step) for step in self.steps]}

    def __str__(self) -> str:
        width = max([len("step"), *(len(step.name) for step in self.steps)])
        lines = [f"{'step':{width}}      values  unequal  largest difference"]
        for step in self.steps:
            worst = f"{step.worst:.0f} steps" if step.integer else f"{step.worst:.1e} (float output)"
            lines.append(f"{step.name:{width}}  {step.values:10}  {100 * step.unequal:6.3f}%  {worst}")
        total = sum(step.values for step in self.steps if step.integer)
        lines.append(f"{'total':{width}}  {total:10}  {100 * self.unequal:6.3f}%  of uint8 values")
        return "\n".join(lines)


def parity(prepared: nn.Module, converted: nn.Module, batches: Iterable[Any]) -> Parity:
    """Compare each integer step with its float simulation, given the integers that the step really got.

    So a difference is the step's own and none that came down to it. Requantising rounds a float32 product; simulation
    rounds a float32 sum: values on the edge between two integers may fall to either side, and no others.

    Args:
        prepared: calibrated, from `prepare`.
        converted: from `convert(prepared)`.
        batches: as for `quant.calibrate.run`.

    Raises:
        ValueError: the two do not belong together, or no batch came.
        TypeError: `batches` is a single batch.
    """
    found = {path: runner for path, runner in runners(prepared).items() if _converted(converted, path)}
    if not found:
        raise ValueError("quant.parity: expected a model from quant.prepare and what quant.convert made of it")
    refuse_single(batches, "quant.parity")
    caller = Caller(prepared)
    steps: dict[str, StepParity] = {}
    with torch.no_grad(), calls_of(converted, found) as calls:
        for batch in batches:
            args, kwargs = caller.arguments(batch)
            calls.clear()
            converted(*args, **kwargs)
            for path, runner in found.items():
                for call in calls.get(path, ()):
                    for step in _unit(path, runner, converted.get_submodule(path), call.args, call.kwargs):
                        steps[step.name] = steps[step.name].and_(step) if step.name in steps else step
    if not steps:
        raise ValueError("quant.parity: no batch came, or no integer step ran; give at least one batch")
    return Parity(tuple(sorted(steps.values(), key=lambda step: (-step.unequal, -step.worst))))


def _converted(converted: nn.Module, path: str) -> bool:
    try:
        module = converted.get_submodule(path)
    except AttributeError:
        return False
    return isinstance(module, (StaticLayer, StaticRecurrent, StaticCell)) or isinstance(
        module._modules.get(RESERVED), ProgramRunner
    )


def _unit(path: str, runner: GraphRunner, unit: nn.Module, args: Any, kwargs: Any) -> Iterator[StepParity]:
    program = unit._modules.get(RESERVED)
    if isinstance(program, ProgramRunner):
        registers = program.registers(*args, **kwargs)
        computed = {one.out for one in program.program.instructions if one.op not in ("call", "quantize", "dequantize")}
    else:
        registers = _layer_registers(unit, runner, *args, **kwargs)
        computed = set(registers)
    for step in runner.plan.steps:
        # What nobody reads is not computed, and convert leaves layers in float that 8 bits cannot hold.
        if step.integer and not computed.isdisjoint({2 * step.output, 2 * step.output + 1}):
            yield _step(".".join(part for part in (path, step.name) if part), step, runner, registers)


def _layer_registers(layer: nn.Module, runner: GraphRunner, *args: Any, **kwargs: Any) -> dict[int, Any]:
    """The registers of a captured module that was nothing but one layer."""
    [step] = [step for step in runner.plan.steps if step.integer]
    if not isinstance(layer, StaticLayer):
        given = bound_values(runner.graph, runner.root, args, kwargs)
        found = layer(*args, **kwargs)
        value = step.inputs[0]
        held = {2 * value + 1: runner.qparams(runner.plan.slot_of[value]).quantize(given[value])}
        output = found[0] if step.output != step.nodes[0] else found
        return {**{2 * index: one for index, one in given.items()}, **held, 2 * step.output: output}
    [value] = step.inputs
    q_x = runner.qparams(runner.plan.slot_of[value]).quantize(*args, **kwargs)
    return {2 * value + 1: q_x, 2 * step.output + runner.plan.emits_integers(step): layer.compute(q_x, 0)}


def _step(name: str, step: Step, runner: GraphRunner, registers: dict[int, Any]) -> StepParity:
    expected = runner.simulated(step, _reals(runner, registers))[step.output]
    if is_recurrent(step):
        return _recurrent(name, step, runner, expected, registers)
    if not isinstance(expected, Tensor) or not expected.numel():
        return StepParity(name, 0.0, 0.0, 0)
    if not runner.plan.emits_integers(step):
        found = registers[2 * step.output]
        size = float(expected.abs().max().clamp(min=1e-30))
        return StepParity(name, float((found - expected).abs().max()) / size, 0.0, expected.numel(), False)
    q_expected = runner.qparams(runner.plan.slot_of[step.output]).quantize(expected)
    apart = (registers[2 * step.output + 1].int() - q_expected.int()).abs()
    return StepParity(name, float(apart.max()), float((apart > 0).double().mean()), apart.numel())


def _recurrent(name: str, step: Step, runner: GraphRunner, expected: Any, registers: dict[int, Any]) -> StepParity:
    """States in steps of their range, in whichever form they come: a state that rounds otherwise changes later ones."""
    qparams = runner.qparams(runner.plan.inner_slots(step)[step.attrs["ranges"][-1]])
    emits = runner.plan.emits_integers(step)
    found = registers[2 * step.output + emits]
    one, other = _first(found), _first(expected)
    apart = ((one if emits else qparams.quantize(one)).int() - qparams.quantize(other).int()).abs()
    if not apart.numel():
        return StepParity(name, 0.0, 0.0, 0)
    return StepParity(name, float(apart.max()), float((apart > 0).double().mean()), apart.numel())


def _first(tree: Any) -> Tensor:
    found: Tensor = next(leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))
    return found


def _reals(runner: GraphRunner, registers: dict[int, Any]) -> Callable[[int], Any]:
    """Gives the real value of a node: what its integers stand for, where it has any."""

    def value(index: int) -> Any:
        found = registers.get(2 * index + 1)
        if found is None:
            return registers[2 * index]
        qparams = runner.qparams(runner.plan.slot_of[index])
        if isinstance(found, (tuple, list)):
            return type(found)(qparams.dequantize(part) for part in found)
        return qparams.dequantize(found)

    return value
