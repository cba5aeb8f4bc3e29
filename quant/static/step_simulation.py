"""Simulation of a step in float, on values and weights that integers can represent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from quant.graph import Graph, Node, arguments_of, evaluate
from quant.kernels import QParams
from quant.ops.linear import Linear
from quant.ops.operator import Weighted
from quant.ops.registered import Registered
from quant.ops.step import Step
from quant.runtime.layers.recurrent_walk import Run, call_of
from quant.runtime.layers.requantizing import clamp_limits, quantized_bias
from quant.runtime.layers.weighted import QWeight
from quant.runtime.names import attribute
from quant.static import weights
from quant.static.int8_recurrent import rounded
from quant.static.recurrent_float import float_run, run_float
from quant.static.registered_layers import simulated_registered

RoundedLayer: TypeAlias = tuple[Tensor, Tensor | None]
"""A layer's weight and bias as floats that integers represent."""


def weighted(step: Step, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer of a weighted step with another weight and bias, with its clamp but without its batch norm."""
    return step.weighted.clamped(step.weighted.product(x, weight, bias))


def simulated(
    step: Step,
    graph: Graph,
    root: nn.Module,
    value: Callable[[int], Any],
    scale: Tensor | None = None,
    smallest: Tensor | None = None,
    learned: Tensor | None = None,
    mean: Tensor | None = None,
    given: QWeight | None = None,
    layer: RoundedLayer | None = None,
    output: QParams | None = None,
    exact: bool = False,
) -> Any:
    """The value of a step before it is rounded to its range.

    Args:
        value: gives what a node gave, already rounded where integers hold it.
        scale: of the input of a weighted step.
        smallest: of the scales that the same layer is called with, here and at other places.
        learned: the weight's scale, where training learned it.
        mean: of the same layer's input, per channel.
        given: the int8 weight, where it is known already.
        layer: what `rounded_layer` gives for the int8 weight, where that is known already; no sum is then `exact`.
        output: the range of a weighted step's value, where that becomes integers.
        exact: add products as integers do (`exactly`), not in float32.
    """
    if not isinstance(step.operator, Weighted):
        own: dict[int, Any] = {}
        if isinstance(step.operator, Registered):
            module, x = attribute(root, graph.nodes[step.nodes[0]].target), value(step.inputs[0])
            own[step.nodes[0]] = simulated_registered(module, step.qconfig, step.operator.make, x)
        for index in step.nodes[len(own) :]:
            own[index] = evaluate(graph.nodes[index], root, lambda i: own[i] if i in own else value(i))
        return own[step.output]
    if layer is None:
        q = given or weights.quantized(step, graph, root, smallest, learned, mean)
        if exact and scale is not None:
            return exactly(step, value(step.inputs[0]), q, scale, output)
        layer = rounded_layer(step, q, scale)
    return weighted(step, value(step.inputs[0]), *layer)


def rounded_layer(step: Step, q: QWeight, scale: Tensor | None) -> RoundedLayer:
    """The weight and the bias in float that the integers of a weighted step stand for, with an input of this scale."""
    bias = q.bias
    if bias is not None and scale is not None:
        bias = quantized_bias(bias, scale * q.scale) * (scale * q.scale)
    return weights.dequantized(q, step), bias


def exactly(step: Step, x: Tensor, q: QWeight, scale: Tensor, output: QParams | None) -> Tensor:
    """A weighted step with exact sums, in float64, rescaled in the order of the integers (equation 7).

    A float32 sum may fall to the other side of an edge between two integers; in a loop that chooses words by the
    largest of many values, one such value decides what follows.

    Args:
        scale: of x, whose values are multiples of it.
        output: of the value, which then is rounded; None where it stays float.
    """
    product_scale = scale * q.scale
    bias = None if q.bias is None else quantized_bias(q.bias, product_scale).double()
    sums = step.weighted.product(torch.round(x.double() / scale.double()), q.q_weight.double(), bias).float()
    after = 0 if isinstance(step.operator, Linear) else q.q_weight.dim() - 2
    multiplier = product_scale if output is None else product_scale / output.scale
    y = sums * multiplier.reshape(-1, *[1] * after)
    clamp = step.weighted.clamp
    if output is None:
        return y if clamp is None else torch.clamp(y, *clamp)
    zero_point = int(output.zero_point)
    ends = clamp_limits(clamp, float(output.scale), zero_point)
    return ((torch.round(y) + zero_point).clamp(*ends) - zero_point) * output.scale


def simulated_recurrent(
    step: Step,
    graph: Graph,
    root: nn.Module,
    value: Callable[[int], Any],
    state: Callable[[int], Any],
    inner: Mapping[str, Callable[[Tensor], Tensor]],
) -> Any:
    """All that a recurrent step gives, as the user's layer does; the output sequence and the states not rounded.

    Args:
        value, state: as in `recurrent_call`.
        inner: by the names of `ops.recurrent.range_names`, how values of that range are rounded.
    """
    assert step.qconfig is not None
    node = graph.nodes[step.nodes[0]]
    module = attribute(root, node.target)
    input, hx = recurrent_call(node, root, value, state)
    return run_float(module, input, hx, lambda name, x: inner[name](x), rounded(module, step.qconfig))


def recurrent_call(
    node: Node, root: nn.Module, value: Callable[[int], Any], state: Callable[[int], Any]
) -> tuple[Any, Any]:
    """The input and the state of a recurrent layer's call, which may be one value.

    Args:
        value: gives what a node gave, as the input's products read it.
        state: the same, as the layer carries it on.
    """
    return call_of(*arguments_of(node, root, value))[0], call_of(*arguments_of(node, root, state))[1]


def simulated_layer(step: Step, graph: Graph, root: nn.Module, inner: Mapping[str, Callable[[Tensor], Tensor]]) -> Run:
    """The function that `simulated_recurrent` runs for each layer and direction, for direct calls."""
    assert step.qconfig is not None
    module = attribute(root, graph.nodes[step.nodes[0]].target)
    return float_run(module, lambda name, x: inner[name](x), rounded(module, step.qconfig))
