"""Simulation of a calibrated model's int8 form in float: what convert would build now, within a context.

Steps of captured graphs are simulated by their runners (`step_simulation.py`). This file has convert's other decisions:
layers that it leaves float or makes dynamic, and programs that it drops. A dynamic layer computes what its int8
stand-in does on the reference, whoever calls it: a program, an island, or the user's own forward. Where that runs as it
is, for a call that no program stands for, a static layer takes a range of the call, as `StaticLayer` does; only weights
of functional calls (`F.linear(x, self.weight)`) are then the user's own and not those of the integers.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quant.dynamic import quantize_dynamic
from quant.graph import Kind
from quant.int8_classes import Maker
from quant.kernels import QParams
from quant.ops.operator import Weighted
from quant.ops.registered import Registered
from quant.ops.step import Step, is_recurrent
from quant.recipe import QConfig, Recipe
from quant.runtime.layers.weighted import range_of_call
from quant.runtime.names import attribute
from quant.runtime.own_forward import computing, is_falling_back
from quant.runtime.own_forward import without_runner as as_users_child
from quant.static.dynamic_fallback import dynamic_part, dynamic_settings, without_runner
from quant.static.folds import agree
from quant.static.outlier_check import leave_float
from quant.static.prepared import Prepared, is_prepared, record_of
from quant.static.recurrent_ranges import agree_on_recurrent
from quant.static.registered_layers import registered_layer
from quant.static.runner import GraphRunner, rounding, runners, unwrapped
from quant.static.step_simulation import simulated
from quant.waiting_forwards import not_waiting

REFERENCE = "reference"


@contextlib.contextmanager
def simulating(prepared: nn.Module, *, exact: bool = False) -> Iterator[nn.Module]:
    """Let a calibrated model compute what its int8 form will, in float: rounded activations, rounded weights.

    Args:
        exact: add products in float64 and rescale the sums as integers are. In float32, in which training rounds and
            parity compares, a value beside the edge between two integers may fall to either side.
    """
    model = unwrapped(prepared)
    with torch.no_grad(), contextlib.ExitStack() as undo:
        undo.enter_context(not_waiting(model, simulates=True))
        info = record_of(model) if is_prepared(model) else None
        for first in runners(model).values():
            programs = first.programs()
            undo.enter_context(_as_they_were(programs))
            seen = [one for one in programs if one.has_seen()]
            if first.alone and not seen:
                undo.enter_context(computing(first.root, _own(first)))
            for one in programs:
                one.simulate, one.adds_exactly = True, exact
                drops = bool(seen) or first.alone
                one.dropped = drops and (one not in seen or not agree(one, seen[0]))
            if info is not None and seen:
                leave_float(seen, info.recipe)
            for one in programs:
                one.known = {}
        agree_on_recurrent(one for first in runners(model).values() for one in first.programs())
        if info is not None:
            for module, qconfig in _becoming_dynamic(model, info):
                stand_in = _stand_in(module, qconfig)
                if stand_in is not None:
                    undo.enter_context(computing(module, stand_in.forward))
            for module, forward in _lone_layers(model).items():
                undo.enter_context(computing(module, forward))
        yield prepared


@contextlib.contextmanager
def as_converted(programs: list[GraphRunner], recipe: Recipe) -> Iterator[None]:
    """Let a module's programs be fused as convert will fuse them, with the layers in float that 8 bits cannot hold."""
    with _as_they_were(programs):
        leave_float(programs, recipe)
        for one in programs:
            one.known = {}
        agree_on_recurrent(programs)
        yield


def _own(runner: GraphRunner) -> Callable[..., Any]:
    """The user's own forward of a captured module."""
    own = runner.own_forward or types.MethodType(type(runner.root).forward, runner.root)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with as_users_child(runner):
            return own(*args, **kwargs)

    return forward


@contextlib.contextmanager
def _as_they_were(programs: list[GraphRunner]) -> Iterator[None]:
    """Restore the programs' present fused graphs afterwards."""
    before = [(one, dict(vars(one)), one.observers) for one in programs]
    try:
        yield
    finally:
        for one, attributes, observers in before:
            one.__dict__.update(attributes)
            one.observers = observers


def _becoming_dynamic(model: nn.Module, info: Prepared) -> Iterator[tuple[nn.Module, QConfig]]:
    """The modules without a static form that convert makes dynamic, with their settings."""
    static: set[int] = set()
    for first in runners(model).values():
        for one in first.programs():
            steps = [] if one.dropped else filter(is_recurrent, one.fused.steps)
            static |= {id(attribute(one.root, one.graph.nodes[step.nodes[0]].target)) for step in steps}
    for name, qconfig in dynamic_settings(model, info).items():
        module = model.get_submodule(name)
        if id(module) not in static:
            yield module, qconfig


def _stand_in(module: nn.Module, qconfig: QConfig) -> nn.Module | None:
    """The dynamic int8 form of a layer; None where it stays float."""
    try:
        recipe = Recipe({"0": dynamic_part(qconfig)}, default=None)
        quantized = quantize_dynamic(nn.Sequential(without_runner(module)), recipe, backend=REFERENCE)
    except ValueError:
        return None
    return quantized.get_submodule("0")


def _lone_layers(model: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """Forwards for direct calls by the user's own forward: of layers of programs, and of batch norms folded into them,
    which then do nothing."""
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for first in runners(model).values():
        for one in first.programs():
            for step in () if one.dropped else one.fused.steps:
                node = one.graph.nodes[step.nodes[0]]
                if isinstance(step.operator, Registered):
                    module = attribute(one.root, node.target)
                    forwards.setdefault(module, _LoneRegistered(module, step.qconfig, step.operator.make).forward)
                if not isinstance(step.operator, Weighted) or node.kind is not Kind.MODULE:
                    continue
                module = attribute(one.root, node.target)
                forwards.setdefault(module, _LoneLayer(module, step, one).forward)
                norm = step.operator.batch_norm
                if norm is not None and one.graph.nodes[norm].kind is Kind.MODULE:
                    part = attribute(one.root, one.graph.nodes[norm].target)
                    forwards.setdefault(part, _FoldedNorm(part).forward)
    return forwards


class _FoldedNorm:
    """A batch norm that is folded into a layer, and so does nothing where the user's forward runs."""

    def __init__(self, module: nn.Module) -> None:
        self.own = module.forward

    def forward(self, input: Tensor) -> Tensor:
        """The input in float32, as a batch norm gives it."""
        output: Tensor = input if is_falling_back() else self.own(input)
        return output


class _LoneRegistered:
    """A registered layer of a program that is called by itself (`StaticQuantModule.forward`)."""

    def __init__(self, module: nn.Module, qconfig: QConfig | None, make: Maker) -> None:
        assert qconfig is not None
        self.own, self.int8 = module.forward, registered_layer(module, qconfig, make)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """With a range of this call where the user's forward runs as it is."""
        return self.int8.dynamic(*args, **kwargs) if is_falling_back() else self.own(*args, **kwargs)


class _LoneLayer:
    """A layer of a program that is called by itself (`StaticLayer.forward`)."""

    def __init__(self, module: nn.Module, step: Step, runner: GraphRunner) -> None:
        self.step, self.runner = step, runner
        own = module.__dict__.get("forward")
        self.unit = own if isinstance(getattr(own, "__self__", None), GraphRunner) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Use the range of this call where the user's forward runs as it is, else those of the layer's first call."""
        if not is_falling_back() and self.unit is not None:
            return self.unit(*args, **kwargs)
        return self._rounded(*args, **kwargs)

    def _rounded(self, input: Tensor) -> Tensor:
        step, runner = self.step, self.runner
        own = runner.qparams(runner.fused.slot_of[step.inputs[0]])
        smallest = runner.input_scales(step)[-1:]
        if is_falling_back():
            step = replace(step, operator=replace(step.weighted, clamp=None))
            scale, zero_point = range_of_call(input)
            own = QParams(scale, torch.tensor(zero_point, dtype=torch.int32), own.scheme)
        x, exact = rounding(own)(input), runner.adds_exactly
        known: dict[str, Any] = {**runner.known_of_weight(self.step), "exact": exact}
        y: Tensor = simulated(step, runner.graph, runner.root, lambda _: x, own.scale, *smallest, **known)
        emits = runner.fused.emits_integers(self.step) and not is_falling_back()
        return rounding(runner.qparams(runner.fused.slot_of[step.output]))(y) if emits else y
