"""Capture: run a model on example inputs, record its calls as a graph, and prove the graph against the model.

A module whose forward cannot be a graph (it branches on a tensor's values, leaves torch and comes back, ...) becomes an
island: one opaque call in its parent's graph, and each module that it calls is captured by itself. A branch on a size,
or on a mask of the caller's, is recorded with a guard that checks it at every run. The user's hooks are recorded
where they are part of what the model computes, and else do not run during capture.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quant.capture.changing_hooks import forwards_with_hooks
from quant.capture.einsum import as_products
from quant.capture.forward_code import looks_at_class
from quant.capture.proved_recording import record
from quant.capture.recorded_modules import Watched, watching
from quant.capture.recorder import Recorder
from quant.capture.undisturbed import depends_on_caller
from quant.capture.unrecordable import refuse_read_once
from quant.graph import Graph
from quant.runtime.arguments import Arguments, bind, copied_together
from quant.runtime.names import full_name


@dataclass
class Capture:
    """The graphs and islands of a model.

    Attributes:
        graphs: dotted name of a captured module -> its graph; '' is the whole model.
        islands: dotted name of an island -> the reason that it is one.
        called: dotted names of all modules that ran.
        state: dotted names of the attributes, buffers and submodules that some forward changed.
        unlike_in_training: dotted name of a layer -> the reason that ranges from training do not fit it in eval mode.
        known: dotted names of modules that are captured already, and not again.
    """

    graphs: dict[str, Graph] = field(default_factory=dict)
    islands: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    state: set[str] = field(default_factory=set)
    unlike_in_training: dict[str, str] = field(default_factory=dict)
    known: Collection[str] = ()


def capture(
    model: nn.Module, example_inputs: Any, *, training: bool = False, islands: Mapping[str, str] | None = None
) -> Capture:
    """Capture `model` on one set of inputs.

    Args:
        model: run in eval mode, without gradients, and restored afterwards.
        example_inputs: a tensor, a tuple or list of positional arguments, a dict of keyword arguments, or both as
            `inspect.signature(model.forward).bind(...)` gives them.
        training: whether the graph is to be trained, so that every function needs its backward.
        islands: dotted name of a known island -> the reason.

    Raises:
        TypeError: forward does not take these arguments.
    """
    captured = Capture(islands=dict(islands or {}))
    args, kwargs = as_arguments(example_inputs)
    try:
        bound = bind(model, args, kwargs)
    except TypeError as error:
        if not isinstance(example_inputs, dict):
            raise
        raise TypeError(
            f"{type(model).__name__}: {error}; a dict gives keyword arguments by their names, here "
            f"{', '.join(map(str, example_inputs))}; for one argument that is a dict give (example_inputs,)"
        ) from error
    refuse_read_once(model, "", bound)
    hooks = forwards_with_hooks(model, "", (args, kwargs), captured.islands)
    with watching(model, with_hooks=hooks) as watched, torch.no_grad():
        _capture_unit(watched, model, "", args, kwargs, captured, training)
    captured.state, captured.unlike_in_training = watched.changed, watched.unlike_in_training
    return captured


def capture_call(
    module: nn.Module,
    path: str,
    call: Arguments,
    islands: Mapping[str, str],
    *,
    training: bool,
    known: Collection[str] = (),
    called_by_user: bool = False,
) -> Capture:
    """Capture another call of a module of a model that was captured before.

    Args:
        path: dotted name of the module in that model.
        islands: dotted name of a known island -> the reason.
        training: as for `capture`.
        known: dotted names of modules in it that are captured already, as which an island may call them.
        called_by_user: whether the user made the call, and not a module around it.
    """
    captured = Capture(islands=dict(islands), known=known)
    refuse_read_once(module, path, bind(module, *call))
    hooks = forwards_with_hooks(module, path, call, captured.islands)
    with watching(module, called_by_user=called_by_user, with_hooks=hooks) as watched, torch.no_grad():
        _capture_unit(watched, module, path, *call, captured, training)
    captured.state, captured.unlike_in_training = watched.changed, watched.unlike_in_training
    return captured


def as_arguments(example_inputs: Any) -> Arguments:
    """A tensor, a tuple or list, a dict, or arguments that `inspect` bound, as the arguments of a call."""
    if isinstance(example_inputs, inspect.BoundArguments):
        return example_inputs.args, dict(example_inputs.kwargs)
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)) and not hasattr(example_inputs, "_fields"):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _capture_unit(
    watched: Watched,
    module: nn.Module,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    captured: Capture,
    training: bool,
) -> None:
    recorder = record(watched, module, path, (args, kwargs), captured.islands, training=training)
    captured.called |= recorder.called
    inside = [path] if path in captured.islands else list(recorder.opaque)
    if path not in captured.islands:
        captured.graphs[path] = as_products(recorder.graph(), module)
    for island in inside:
        _capture_children(watched, recorder, island, captured, training)


def _capture_children(watched: Watched, recorder: Recorder, island: str, captured: Capture, training: bool) -> None:
    """Capture each module that an island calls."""
    parent = recorder.inside.calls[island]
    forward = parent.module.__dict__["forward"]
    for child in parent.children:
        if looks_at_class(parent.module, forward, recorder.inside.calls[child].module):
            captured.islands.setdefault(child, f"the forward of {island or 'the model'} asks for its class")
        _capture_child(watched, recorder, child, captured, training)


def _capture_child(watched: Watched, recorder: Recorder, path: str, captured: Capture, training: bool) -> None:
    """Capture a module that an island calls; where it cannot have a graph, the modules that it calls."""
    if path in captured.graphs or path in captured.known or path not in recorder.inside.calls:
        return
    call = recorder.inside.calls[path]
    if watched.has_hooks_in(call.module):
        captured.islands.setdefault(path, "the model's own library has hooks in it, which run in calls alone")
    if call.module in watched.with_hooks:
        captured.islands.setdefault(path, "a forward hook is part of what it computes")
    if call.reason:
        captured.islands.setdefault(path, call.reason)
    parameters = (full_name(path, name) for name, _ in call.module.named_parameters())
    if not watched.changed.isdisjoint(parameters):
        captured.islands.setdefault(path, "a forward changes its parameters")
    if path not in captured.islands and depends_on_caller(watched, call):
        captured.islands[path] = "it depends on what its caller sets beside its arguments"
    if path in captured.islands:
        _capture_children(watched, recorder, path, captured, training)
        return
    args, kwargs = copied_together(call.example)
    with call.autocast.again():
        _capture_unit(watched, call.module, path, args, kwargs, captured, training)
