"""A calibrated model as its int8 form will compute it: what convert would decide now, for the time of a context.

Steps of captured graphs are simulated by their runners (`simulate.py`). Here is what convert does besides: the layers
that it leaves float or makes dynamic, and the programs that it drops. A dynamic layer computes what its int8 stand-in
does on the reference, whoever calls it: a program, an island, or the user's own forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quant.dynamic import quantize_dynamic
from quant.fuse import is_recurrent
from quant.graph import attribute
from quant.recipe import QConfig, Recipe
from quant.static.beyond import leave_float
from quant.static.rest import dynamic_part, dynamic_settings, without_runner
from quant.static.runner import RESERVED, GraphRunner, programs_of, runners, unwrapped

REFERENCE = "reference"


@contextlib.contextmanager
def simulating(prepared: nn.Module) -> Iterator[nn.Module]:
    """Let a calibrated model compute what its int8 form will, in float: rounded activations, rounded weights."""
    model = unwrapped(prepared)
    with torch.no_grad(), contextlib.ExitStack() as undo:
        info = model.__dict__.get(RESERVED + "_prepared")
        for first in runners(model).values():
            programs = programs_of(first)
            undo.enter_context(_as_they_were(programs))
            seen = [one for one in programs if one.has_seen()]
            for one in programs:
                one.simulate, one.dropped = True, bool(seen) and one not in seen
            if info is not None and seen:
                leave_float(seen, info.recipe)
            for one in programs:
                one.known = {}
        if info is not None:
            for module, qconfig in _becoming_dynamic(model, info):
                undo.enter_context(_computing(module, _stand_in(module, qconfig)))
        yield prepared


@contextlib.contextmanager
def _as_they_were(programs: list[GraphRunner]) -> Iterator[None]:
    """Afterwards let programs run the plans that they have now."""
    before = [(one, dict(vars(one)), one.points) for one in programs]
    try:
        yield
    finally:
        for one, attributes, points in before:
            one.__dict__.update(attributes)
            one.points = points


def _becoming_dynamic(model: nn.Module, info: Any) -> Iterator[tuple[nn.Module, QConfig]]:
    """The modules that convert makes dynamic, with their settings; not those that have a static form."""
    static: set[int] = set()
    for first in runners(model).values():
        for one in programs_of(first):
            steps = [] if one.dropped else filter(is_recurrent, one.plan.steps)
            static |= {id(attribute(one.root, one.graph.nodes[step.nodes[0]].target)) for step in steps}
    for name, qconfig in dynamic_settings(model, info).items():
        module = model.get_submodule(name)
        if id(module) not in static:
            yield module, qconfig


def _stand_in(module: nn.Module, qconfig: QConfig) -> nn.Module | None:
    """The int8 form of a layer by itself; None where it has none and stays float."""
    try:
        recipe = Recipe({"0": dynamic_part(qconfig)}, default=None)
        made = quantize_dynamic(nn.Sequential(without_runner(module)), recipe, backend=REFERENCE)
    except ValueError:
        return None
    return made.get_submodule("0")


@contextlib.contextmanager
def _computing(module: nn.Module, stand_in: nn.Module | None) -> Iterator[None]:
    """Let a module compute what another does; its own hooks run."""
    if stand_in is None:
        yield
        return
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = stand_in.forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before
