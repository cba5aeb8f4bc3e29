"""Parts of a captured module that are called directly, as `generate()` calls an encoder before its decoder.

The module's graph sees through such a part. Its first direct call in calibration gives the part a program of its own,
whose values share observers with the values at the same places in the graphs around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from quant.graph import Kind
from quant.runtime.matching import CaptureMismatch
from quant.runtime.names import full_name
from quant.runtime.own_forward import falling_back, is_falling_back
from quant.static.runner import GraphRunner, is_replaying
from quant.waiting_forwards import WaitingForward

MakeProgram = Callable[[GraphRunner, str, tuple[Any, ...], dict[str, Any]], GraphRunner | None]
"""Adds a program for a call to the part of this name in a runner's module; None where it cannot have one."""


class CalledAlone(WaitingForward):
    """The forward of a part of a prepared module, for calls from outside of the module's graphs."""

    simulates = True

    def __init__(self, part: nn.Module, path: str, runner: GraphRunner, make: MakeProgram) -> None:
        super().__init__(part)
        self.path, self.runner, self.make = path, runner, make
        self._refused = False

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The part's forward."""
        if self.runner.simulate and not is_falling_back():
            return self._simulated(args, kwargs)
        waits = not (self._refused or is_falling_back() or is_replaying())
        program = self.add_program(args, kwargs) if waits else None
        return self.as_it_is(args, kwargs) if program is None else program.run(*args, **kwargs)

    def _simulated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the part as a converted model does without a program for it (`static/part_calls.py`)."""
        span = next(one for one in self.runner.graph.spans if one.path == self.path)
        try:
            return self.runner.simulated_part(self.watches, span, args, kwargs)
        except CaptureMismatch:
            with falling_back():
                return self.as_it_is(args, kwargs)

    def add_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphRunner | None:
        runner = self.make(self.runner, self.path, args, kwargs)
        self._refused = runner is None
        return runner


def watch_parts(runner: GraphRunner, make: MakeProgram) -> None:
    """Let parts that a graph sees through be captured when they are called directly."""
    for path in dict.fromkeys(span.path for span in runner.graph.spans):
        part = runner.root.get_submodule(path)
        if part is not runner.root and not is_ours(part):
            part.__dict__["forward"] = CalledAlone(part, path, runner, make)


def is_ours(module: nn.Module) -> bool:
    """Whether a module of a prepared model has a forward of this library."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, WaitingForward) or isinstance(getattr(forward, "__self__", None), GraphRunner)


def layers_of(runner: GraphRunner) -> frozenset[str]:
    """The full names of the modules of a program's integer steps."""
    nodes = [runner.graph.nodes[step.nodes[0]] for step in runner.fused.steps if step.integer]
    return frozenset(full_name(runner.graph.path, node.target) for node in nodes if node.kind is Kind.MODULE)
