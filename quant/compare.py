"""Lining two models up, step by step: the int8 form against its simulation, and against the float model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.capture import as_arguments
from quant.fuse import Step
from quant.prepare import RESERVED, GraphRunner, runners
from quant.static.program import ProgramRunner
from quant.static.simulate import simulated


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
    source = runner.plan.slot_of[step.inputs[0]]
    expected = simulated(step, runner.graph, runner.root, value, runner.qparams(source).scale)
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
