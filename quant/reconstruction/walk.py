"""All calls of a captured module, taken through its steps side by side: in float, and rounded as integers will be.

Layers that are done are rounded as they were chosen, so what comes to the next one is what it will get (asymmetric
reconstruction, equation 25 of Nagel et al. 2020). Of each call only the values are kept that a later step reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quant.calibrate import CalibrationError
from quant.calibrate.batches import describe
from quant.calibrate.driver import Forward
from quant.fusion.last_readers import last_readers
from quant.graph import evaluate
from quant.ops.step import Step
from quant.reconstruction.units import is_input
from quant.static.runner import GraphRunner, replaying, seen_by


@dataclass
class Call:
    """The values of one call, by node.

    Attributes:
        real: in float.
        rounded: as the integers have them.
        both: those of `FusedGraph.read_both_ways`, rounded.
    """

    real: dict[int, Any]
    rounded: dict[int, Any]
    both: dict[int, Any] = field(default_factory=dict)

    def copy(self) -> Call:
        """The same values, to go another way with."""
        return Call(dict(self.real), dict(self.rounded), dict(self.both))


class Walk:
    """The calls of one captured module, at one place of its steps."""

    def __init__(self, runner: GraphRunner, calls: Sequence[dict[int, Any]]) -> None:
        self.runner = runner
        self.calls = [Call(dict(values), dict(values)) for values in calls]
        self._dead = last_readers(runner.fused)

    def advance(self, steps: Iterable[Step]) -> None:
        """Take every call through these steps, in float and rounded."""
        for step in steps:
            for call in self.calls:
                self.run_float(step, call)
                self.run_rounded(step, call)

    def run_float(self, step: Step, call: Call) -> None:
        """A step's value in float."""
        if not is_input(step, self.runner.fused):
            for index in step.nodes:
                node = self.runner.graph.nodes[index]
                call.real[index] = evaluate(node, self.runner.root, call.real.__getitem__)
            for index in step.nodes[:-1]:
                call.real.pop(index, None)
        for value in self._dead.get(step.output, ()):
            call.real.pop(value, None)

    def run_rounded(self, step: Step, call: Call) -> None:
        """A step's value as the integers have it."""
        self.runner.simulate_steps([step], call.rounded, call.both)
        for value in self._dead.get(step.output, ()):
            call.rounded.pop(value, None)
            call.both.pop(value, None)

    def inputs(self, step: Step) -> Iterator[tuple[Any, Any]]:
        """What a weighted step reads in each call: rounded, and in float."""
        value = step.inputs[0]
        for call in self.calls:
            seen = seen_by(step, call.rounded, call.both)
            yield self.runner.split_finely(step, seen.__getitem__)(value), call.real[value]


@contextlib.contextmanager
def _recording(runners: Iterable[GraphRunner]) -> Iterator[dict[int, list[dict[int, Any]]]]:
    """The values that calls of these programs begin with, by the program's id."""
    calls: dict[int, list[dict[int, Any]]] = {}
    noted = list(runners)
    for one in noted:
        calls[id(one)] = []
        one.on_call = calls[id(one)].append
    try:
        yield calls
    finally:
        for one in noted:
            one.on_call = None


def recorded_calls(
    prepared: nn.Module, runners: Iterable[GraphRunner], batches: Iterable[Any], forward: Forward
) -> dict[int, list[dict[int, Any]]]:
    """The calls of programs that batches of data make, in float, by the program's id."""
    with _recording(runners) as calls, torch.no_grad(), replaying():
        for index, batch in enumerate(batches):
            try:
                forward(prepared, batch)
            except Exception as error:
                what = f"quant.learn_rounding: batch {index}, {describe(batch)}: {type(error).__name__}: {error}"
                raise CalibrationError(what) from error
    return calls
