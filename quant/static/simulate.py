"""A step in float, on values that integers can hold, with the weights that integers hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quant.fuse import Step
from quant.graph import Graph, evaluate
from quant.static import weights
from quant.static.weights import product


def weighted(step: Step, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer of a weighted step with another weight and bias, its clamp included, its batch norm not."""
    y = product(step, x, weight, bias)
    return y if step.attrs.get("clamp") is None else torch.clamp(y, *step.attrs["clamp"])


def simulated(
    step: Step,
    graph: Graph,
    root: nn.Module,
    value: Callable[[int], Any],
    scale: Tensor | None = None,
    smallest: Tensor | None = None,
    learned: Tensor | None = None,
    mean: Tensor | None = None,
) -> Any:
    """The value of a step, before it is rounded to its own range.

    Args:
        value: gives what a node gave, already rounded where integers hold it.
        scale: of the input of a weighted step.
        smallest: of the scales that the same layer is called with, here and at other places.
        learned: the weight's scale, where training learned it.
        mean: of the same layer's input, per channel.
    """
    if "weight" not in step.attrs:
        own: dict[int, Any] = {}
        for index in step.nodes:
            own[index] = evaluate(graph.nodes[index], root, lambda i: own[i] if i in own else value(i))
        return own[step.output]
    q = weights.quantized(step, graph, root, smallest, learned, mean)
    bias = q.bias
    if bias is not None and scale is not None:
        bias = weights.quantized_bias(bias, scale * q.scale) * (scale * q.scale)
    return weighted(step, value(step.inputs[0]), weights.dequantized(q, step), bias)
