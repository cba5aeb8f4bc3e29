"""Recurrent layers of torch step by step, so that what their products read can be rounded: for simulation.py alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import handle_torch_function, has_torch_function

RECURRENT = (nn.RNNBase, nn.RNNCellBase)

Change = Callable[[nn.Module, str, Tensor], Tensor]
"""(layer, what of it, values) to what the layer reads instead. A state has one name in both directions of a layer."""


@contextmanager
def stepwise(model: nn.Module, change: Change) -> Iterator[None]:
    """Let the recurrent layers of a model give `change` their inputs, and their states before each step."""
    layers = {module: module.forward for module in model.modules() if isinstance(module, RECURRENT)}
    for layer, own in layers.items():
        layer.forward = partial(recurrent, layer, own, change)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def recurrent(layer: nn.Module, own: Callable[..., Any], change: Change, x: Any, state: Any = None) -> Any:
    """The layer's forward, a single call to whoever watches functions. A PackedSequence goes as it is."""
    if isinstance(x, PackedSequence):
        return own(x, state)
    if has_torch_function((x,)):
        return handle_torch_function(recurrent, (x,), layer, own, change, x, state)
    if isinstance(layer, nn.RNNCellBase):
        return _cell(layer, change, x, state)
    return _sequence(layer, change, x, state)


def _cell(layer: Any, change: Change, x: Tensor, state: Any) -> Any:
    states = _given(state, x.new_zeros(*x.shape[:-1], layer.hidden_size), isinstance(layer, nn.LSTMCell))
    weights = [layer.weight_ih, layer.weight_hh, layer.bias_ih, layer.bias_hh]
    inputs = F.linear(change(layer, "input", x), weights[0], weights[2])
    states = _step(layer, _kind(layer), "state", change, inputs, states, weights)
    return tuple(states) if len(states) > 1 else states[0]


def _sequence(layer: Any, change: Change, x: Tensor, state: Any) -> Any:
    batched = x.dim() == 3
    steps = x.unsqueeze(1) if not batched else x.transpose(0, 1) if layer.batch_first else x
    ways = 2 if layer.bidirectional else 1
    size = layer.proj_size or layer.hidden_size
    hidden = x.new_zeros(layer.num_layers * ways, steps.shape[1], size)
    first = _given(state, hidden, layer.mode == "LSTM")
    if first[-1].shape[-1] != layer.hidden_size:
        first[-1] = x.new_zeros(*hidden.shape[:-1], layer.hidden_size)
    if not batched and state is not None:
        first = [one.unsqueeze(1) for one in first]
    finals: list[list[Tensor]] = []
    for index in range(layer.num_layers):
        outputs = []
        for way in range(ways):
            weights = _weights(layer, index, way)
            name = "input" if index == 0 else f"state {index - 1}"
            gates = F.linear(change(layer, name, steps), weights[0], weights[2])
            states = [one[len(finals)] for one in first]
            seen = []
            for one in gates.flip(0) if way else gates:
                states = _step(layer, _kind(layer), f"state {index}", change, one, states, weights)
                seen.append(states[0])
            outputs.append(torch.stack(seen[::-1] if way else seen))
            finals.append(states)
        steps = torch.cat(outputs, dim=-1)
    last = [torch.stack(each) for each in zip(*finals, strict=True)]
    if not batched:
        steps, last = steps.squeeze(1), [one.squeeze(1) for one in last]
    elif layer.batch_first:
        steps = steps.transpose(0, 1)
    return steps, tuple(last) if len(last) > 1 else last[0]


def _given(state: Any, zeros: Tensor, has_cell: bool) -> list[Tensor]:
    if state is None:
        return [zeros, zeros] if has_cell else [zeros]
    return list(state) if has_cell else [state]


def _weights(layer: Any, index: int, way: int) -> list[Tensor | None]:
    """Of the input, of the state, their biases, and of an LSTM's projection."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    return [getattr(layer, f"{name}_l{index}{'_reverse' * way}", None) for name in names]


def _kind(layer: Any) -> str:
    name = type(layer).__name__.removesuffix("Cell")
    return layer.nonlinearity if name == "RNN" else name


def _step(
    layer: nn.Module, kind: str, name: str, change: Change, inputs: Tensor, states: list[Tensor], weights: list[Any]
) -> list[Tensor]:
    """One step from its inputs' share of the gates; equations as in torch's documentation of LSTM, GRU and RNN."""
    h = states[0]
    gates = F.linear(change(layer, name, h), weights[1], weights[3])
    if kind == "GRU":
        reset, update, new = inputs.chunk(3, dim=-1)
        of_reset, of_update, of_new = gates.chunk(3, dim=-1)
        candidate = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
        return [torch.lerp(candidate, h, torch.sigmoid(update + of_update))]
    if kind == "LSTM":
        i, f, g, o = (inputs + gates).chunk(4, dim=-1)
        c = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        projection = weights[4] if len(weights) > 4 else None
        return [h if projection is None else F.linear(change(layer, f"{name} before its projection", h), projection), c]
    return [torch.tanh(inputs + gates) if kind == "tanh" else torch.relu(inputs + gates)]
