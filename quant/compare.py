"""Lining two models up, step by step: `compare` the int8 form with float, `parity` with its own simulation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibrate.batches import Caller
from quant.capture import as_arguments
from quant.fuse import Step
from quant.graph import Graph, evaluate
from quant.prepare import RESERVED, GraphRunner, bound_values, runners
from quant.static.layers import StaticLayer
from quant.static.program import ProgramRunner
from quant.static.simulate import simulated

MANY_CLIPPED = 0.001
"""Share of clipped values from which clipping is named as the cause: one value in a thousand."""

FEW_STEPS = 16
"""A channel whose largest value is fewer steps of the tensor's scale than this has less than 5 bits left."""

ONE_SIDED = 0.5
"""Share of the error's power that is its mean per channel, from which the error is a shift and no noise."""

OUTLIERS = 40.0
"""Largest value over root mean square, from which a few values take the range of all others. Of a normal distribution
the ratio reaches 6 in a million values."""


@dataclass(frozen=True)
class StepError:
    """How far one step of the int8 model is from float.

    Attributes:
        name: of the step: the user's module, or what was called.
        sqnr: in dB, of the step's output, with all error that came down to it; inf where there is none.
        cosine: between the two outputs.
        clipped: share of the float values that lie outside the int8 range; 0.0 for a float output.
        cause: the likely one, or "".
    """

    name: str
    sqnr: float
    cosine: float
    clipped: float
    cause: str


@dataclass(frozen=True)
class Comparison:
    """Every step, the worst first. Printable, iterable, and JSON through `to_dict`."""

    steps: tuple[StepError, ...]

    def __iter__(self) -> Iterator[StepError]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, name: str) -> StepError:
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(f"no step {name!r} in the comparison; it has {[step.name for step in self.steps]}")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {"steps": [asdict(step) for step in self.steps]}

    def __str__(self) -> str:
        width = max([len("step"), *(len(step.name) for step in self.steps)])
        lines = [f"{'step':{width}}  SQNR dB   cosine  clipped  likely cause"]
        for step in self.steps:
            numbers = f"{step.sqnr:7.2f}  {step.cosine:7.5f}  {100 * step.clipped:6.3f}%"
            lines.append(f"{step.name:{width}}  {numbers}  {step.cause}".rstrip())
        return "\n".join(lines)


def compare(model: nn.Module, converted: nn.Module, batches: Iterable[Any]) -> Comparison:
    """Per-layer error of the real int8 model against float, the worst first, with the likely cause.

    Args:
        model: the float model that `converted` was prepared from; run in eval mode, and left as it was.
        converted: from `convert`.
        batches: as for `quant.calibrate.run`: tensors, tuples or dicts; of an (input, label) pair the input is used.

    Raises:
        ValueError: `converted` is not from `convert`, or no batch came.
    """
    units = {path: module for path, module in converted.named_modules() if _is_unit(module)}
    if not units:
        raise ValueError("quant.compare: expected a model from quant.convert, with integer layers in it")
    sums: dict[str, _Sums] = {}
    caller = Caller(model)
    was = model.training
    with torch.no_grad(), _calls(model.eval(), units) as of_float, _calls(converted, units) as of_int8:
        for batch in batches:
            args, kwargs = caller.arguments(batch)
            of_float.clear()
            of_int8.clear()
            model(*args, **kwargs)
            converted(*args, **kwargs)
            for path, unit in units.items():
                for one, other in zip(of_float.get(path, ()), of_int8.get(path, ()), strict=False):
                    _add_unit(path, model.get_submodule(path), unit, one, other, sums)
    model.train(was)
    if not sums:
        raise ValueError("quant.compare: no batch came, or no integer step ran; give at least one batch")
    errors = [total.error(name) for name, total in sums.items()]
    return Comparison(tuple(sorted(errors, key=lambda error: error.sqnr)))


@dataclass(frozen=True)
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, StaticLayer) or isinstance(module._modules.get(RESERVED), ProgramRunner)


@contextlib.contextmanager
def _calls(model: nn.Module, units: dict[str, nn.Module]) -> Iterator[dict[str, list[_Call]]]:
    """The calls of the named submodules while the context lasts."""
    found: dict[str, list[_Call]] = {}

    def hook(path: str) -> Callable[..., None]:
        return lambda _, args, kwargs, output: found.setdefault(path, []).append(_Call(args, kwargs, output))

    handles = [model.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True) for path in units]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _add_unit(path: str, model: nn.Module, unit: nn.Module, one: _Call, other: _Call, sums: dict[str, _Sums]) -> None:
    """Add one call of a captured module, in float and in int8, to the sums of its steps."""
    runner = unit._modules.get(RESERVED)
    if not isinstance(runner, ProgramRunner):
        sums.setdefault(path or "(root)", _Sums()).add(one.output, other.output, None)
        return
    values = _float_values(runner.graph, model, one)
    registers = runner.registers(*other.args, **other.kwargs)
    for instruction in runner.program.instructions:
        if instruction.op in ("quantize", "dequantize", "move", "call"):
            continue
        expected, found = values[instruction.out // 2], registers[instruction.out]
        known = runner.ranges[instruction.out // 2] if instruction.out % 2 else None
        if known is not None:
            found = (found.to(torch.float32) - known[1]) * known[0]
        name = ".".join(part for part in (path, instruction.step) if part)
        sums.setdefault(name, _Sums()).add(expected, found, known)


def _float_values(graph: Graph, model: nn.Module, call: _Call) -> dict[int, Any]:
    values = bound_values(graph, model, call.args, call.kwargs)
    for node in graph.nodes:
        if node.kind != "input":
            values[node.index] = evaluate(node, model, values.__getitem__)
            # A later call may change it in place.
            if isinstance(values[node.index], Tensor):
                values[node.index] = values[node.index].clone()
    return values


@dataclass
class _Sums:
    """What is kept of a step over all batches: sums, so that memory does not grow."""

    signal: float = 0.0
    other: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    shift: float = 0.0
    clipped: float = 0.0
    count: int = 0
    largest: float = 0.0
    scale: float = 0.0
    channels: Tensor = field(default_factory=lambda: torch.zeros(0))

    def add(self, expected: Tensor, found: Tensor, known: tuple[float, int] | None) -> None:
        """Add one output in float and in int8; known is the scale and zero point of the latter."""
        a, b = expected.detach().double(), found.detach().double()
        if not a.numel():
            return
        error = b - a
        self.signal += float(a.square().sum())
        self.other += float(b.square().sum())
        self.product += float((a * b).sum())
        self.noise += float(error.square().sum())
        axis = 1 if a.dim() > 2 else a.dim() - 1
        others = [d for d in range(a.dim()) if d != axis]
        means = error.mean(others) if others else error
        self.shift += float(means.square().sum()) * a.numel() / means.numel()
        self.count += a.numel()
        self.largest = max(self.largest, float(a.abs().max()))
        peaks = a.abs().amax(others) if others else a.abs()
        self.channels = peaks if self.channels.shape != peaks.shape else torch.maximum(self.channels, peaks)
        if known is not None:
            self.scale = known[0]
            low, high = -known[1] * known[0], (255 - known[1]) * known[0]
            self.clipped += float(((a < low - known[0]) | (a > high + known[0])).sum())

    def error(self, name: str) -> StepError:
        """The step's line."""
        sqnr = math.inf if not self.noise else 10 * math.log10(max(self.signal, 1e-300) / self.noise)
        size = math.sqrt(self.signal * self.other)
        cosine = self.product / size if size else float(self.signal == self.other)
        return StepError(name, sqnr, cosine, self.clipped / max(self.count, 1), self._cause(sqnr))

    def _cause(self, sqnr: float) -> str:
        if sqnr > 30:
            return ""
        if self.clipped > MANY_CLIPPED * self.count:
            return (
                f"{100 * self.clipped / self.count:.2g} % of the values lie outside the range: calibrate on more data"
            )
        if self.shift > ONE_SIDED * self.noise:
            return "the error is a shift of whole channels: bias correction would help"
        rms = math.sqrt(self.signal / self.count)
        if rms and self.largest > OUTLIERS * rms:
            return f"outliers: the largest value is {self.largest / rms:.0f} times the root mean square"
        live = self.channels[self.channels > 0]
        if self.scale and live.numel() > 1 and float(live.quantile(0.25)) < FEW_STEPS * self.scale:
            spread = float(live.max() / live.quantile(0.25))
            return f"channels differ in range by {spread:.0f} times and share one scale"
        return "error of the layers before"


@dataclass(frozen=True)
class StepParity:
    """How one step of the int8 model differs from its simulation on the same integers.

    Attributes:
        name: of the step.
        worst: largest difference, in steps of the output's scale; of a float output, relative to its largest value.
        unequal: share of values that differ at all; 0.0 for a float output.
        integer: whether the output is uint8.
    """

    name: str
    worst: float
    unequal: float
    integer: bool = True

    @property
    def holds(self) -> bool:
        """Whether simulation and integers agree: within one step, or, in float, within what float sums differ by."""
        return self.worst <= (1 if self.integer else 1e-4)


def parity(prepared: nn.Module, converted: nn.Module, inputs: Any) -> list[StepParity]:
    """Compare each integer step with its float simulation, given the integers that the step really got.

    So a difference is the step's own and none that came down to it.

    Args:
        prepared: calibrated, from `prepare`.
        converted: from `convert(prepared)`.
        inputs: as example_inputs.

    Raises:
        ValueError: the two do not belong together, or the models are not captured as a whole.
    """
    runner, program = runners(prepared).get(""), converted._modules.get(RESERVED)
    if runner is None or not isinstance(program, ProgramRunner):
        raise ValueError("quant.compare.parity: expected a model that was captured as a whole, prepared and converted")
    args, kwargs = as_arguments(inputs)
    with torch.no_grad():
        registers = program.registers(*args, **kwargs)
        # What nobody reads is not computed.
        steps = [step for step in runner.plan.steps if step.integer and _filled(step, registers)]
        return [_step_parity(step, runner, registers) for step in steps]


def _filled(step: Step, registers: dict[int, Any]) -> bool:
    return 2 * step.output in registers or 2 * step.output + 1 in registers


def _step_parity(step: Step, runner: GraphRunner, registers: dict[int, Any]) -> StepParity:
    value = _reals(runner, registers)
    expected = simulated(step, runner.graph, runner.root, value, *runner.input_scales(step))
    if not isinstance(expected, Tensor):
        return StepParity(step.name, 0.0, 0.0)
    if not runner.plan.emits_integers(step):
        found = registers[2 * step.output]
        size = float(expected.abs().max().clamp(min=1e-30)) if expected.numel() else 1.0
        return StepParity(
            step.name, float((found - expected).abs().max()) / size if expected.numel() else 0.0, 0.0, False
        )
    q_expected = runner.qparams(runner.plan.slot_of[step.output]).quantize(expected)
    steps = (registers[2 * step.output + 1].int() - q_expected.int()).abs()
    if not steps.numel():
        return StepParity(step.name, 0.0, 0.0)
    return StepParity(step.name, float(steps.max()), float((steps > 0).double().mean()))


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
