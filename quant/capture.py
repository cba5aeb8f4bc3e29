"""Capture: run a model once on example inputs and keep what it called as a graph.

A module whose forward cannot be kept (it branches on a tensor's values, writes into parts of tensors, ...) becomes an
island: one opaque call in its parent's graph, and the modules that it calls are captured each by itself. Branches on
sizes are kept together with a guard that checks them at every run. No hook of the user's runs during capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quant.static.arguments import Arguments, copied
from quant.static.tracer import Capture, Tracer


def capture(model: nn.Module, example_inputs: Any) -> Capture:
    """Capture `model` on one set of inputs.

    Args:
        model: left as it is; run in eval mode, without gradients.
        example_inputs: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments.

    Raises:
        TypeError: forward does not take these arguments.
    """
    found = Capture()
    args, kwargs = as_arguments(example_inputs)
    with _evaluating(model), _keeping(model), torch.no_grad():
        _capture_unit(model, "", args, kwargs, found)
    return found


def as_arguments(example_inputs: Any) -> Arguments:
    """A tensor, a tuple or list, or a dict, as the positional and keyword arguments of a call."""
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)) and not hasattr(example_inputs, "_fields"):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _capture_unit(module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], found: Capture) -> None:
    tracer = Tracer(module, path, found)
    try:
        found.graphs[path] = tracer.trace(args, kwargs)
    except Exception as error:
        tracer.forget()
        tracer.run_island(path, module, copied(args), copied(kwargs), error)
        children = tracer.calls.pop(path).children
        for child in children:
            _capture_child(tracer, child, found)
        return
    for island in list(tracer.opaque):
        for child in tracer.calls.pop(island).children:
            _capture_child(tracer, child, found)


def _capture_child(tracer: Tracer, path: str, found: Capture) -> None:
    """Capture a module that an island calls, or, where its calls do not look alike, the modules that it calls."""
    if path in found.graphs or path in found.islands or path not in tracer.calls:
        return
    call = tracer.calls[path]
    if call.varies:
        found.islands[path] = "it is called with different arguments each time"
        for child in call.children:
            _capture_child(tracer, child, found)
        return
    _capture_unit(call.module, path, *call.example, found)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _keeping(model: nn.Module) -> Iterator[None]:
    """A forward may note on the module what it saw (`self.attention = weights`), which under capture is no tensor."""
    stores = ("_parameters", "_buffers", "_modules")
    kept = [(module, dict(vars(module)), [dict(vars(module)[name]) for name in stores]) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, contents in kept:
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in zip(stores, contents, strict=True):
                vars(module)[name].clear()
                vars(module)[name].update(content)
