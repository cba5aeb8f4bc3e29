"""Where a prepared model computes: on the device that its float model is on, and goes to.

A forward that asks for the device of a tensor (`torch.arange(n, device=x.device)`) leaves the answer in its graph. That
is the device of the model, and no other tensor's, where all parameters and buffers are on one.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from quant.graph import Graph
from quant.runtime.trees import map_leaves


def device_of(module: nn.Module) -> torch.device | None:
    """The device of all parameters and buffers of a module; None where there are none, or several devices."""
    devices = {tensor.device for tensors in (module.parameters(), module.buffers()) for tensor in tensors}
    return devices.pop() if len(devices) == 1 else None


def tensors_on(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """Let `torch.zeros` and its kind make tensors there, whatever the user's default device is; None for no matter."""
    if device is None or torch.get_default_device() == device:
        return contextlib.nullcontext()
    return device


def relocate(graph: Graph, old: torch.device, new: torch.device) -> None:
    """Let a graph of a model that was on one device be that of the model on another; in place."""

    def moved(tree: Any) -> Any:
        return map_leaves(lambda leaf: new if isinstance(leaf, torch.device) and _is_same(leaf, old) else leaf, tree)

    for node in graph.nodes:
        node.args, node.kwargs = moved((node.args, node.kwargs))
    for span in graph.spans:
        span.arguments, span.output = moved((span.arguments, span.output))
    graph.arguments, graph.output = moved((graph.arguments, graph.output))


def _is_same(one: torch.device, other: torch.device) -> bool:
    """Whether two are the same device; "cuda" is "cuda:0" unless a program says otherwise."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)
