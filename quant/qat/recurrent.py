"""Recurrent layers under training: the float loop over time with rounded weights, inputs and states.

The states of a step are rounded by the range that the layer has when the sequence begins: it follows the states of
whole sequences, which torch's own kernels compute beforehand, because the first state is all zeros and no range.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quant.fuse import Step
from quant.graph import arguments_of, attribute
from quant.observers.fake_quantize import FakeQuantize, fake_quantize
from quant.prepare import GraphRunner
from quant.qat.points import SharedFakeQuantize
from quant.qat.weights import straight_through
from quant.static.recurrent import Tensors, call_of, observe, run_float, tensors_of
from quant.static.weights import dequantized_rows


def trained(runner: GraphRunner, step: Step, values: dict[int, Any], *, rounding: bool) -> dict[int, Any]:
    """What a recurrent step gives, by node: all of it, and the output sequence rounded where integers read it.

    Args:
        values: of the nodes before.
        rounding: round the weights.
    """
    node = runner.graph.nodes[step.nodes[0]]
    module = attribute(runner.root, node.target)
    args, kwargs = arguments_of(node, runner.root, values.__getitem__)
    points = {name: _Point(runner, slot, (node.target, name)) for name, slot in runner.plan.inner_slots(step).items()}
    if runner.training:
        with torch.no_grad():
            observe(module, args, kwargs, module(*args, **kwargs), lambda name, x: points[name].look(x))
    input, hx = call_of(args, kwargs)
    tensors = _rounded(step) if rounding else tensors_of
    found = run_float(module, input, hx, lambda name, x: points[name].round(x), tensors)
    if len(step.nodes) == 1:
        return {node.index: found}
    y = points[step.attrs["ranges"][-1]].round(found[0]) if runner.plan.emits_integers(step) else found[0]
    return {node.index: found, step.output: y}


class _Point:
    """A fake quantiser that looks at whole sequences and rounds single steps."""

    def __init__(self, runner: GraphRunner, slot: str, key: tuple[str, str]) -> None:
        self.point: Any = runner.point(slot)
        found = runner.plan.slots[slot]
        self.place = len(found.observed) + found.inner.index(key)

    def look(self, x: Tensor) -> Tensor:
        shared = isinstance(self.point, SharedFakeQuantize)
        seen: Tensor = self.point.at(self.place, x) if shared else self.point(x)
        return seen

    def round(self, x: Tensor) -> Tensor:
        if not isinstance(self.point, FakeQuantize):
            learned: Tensor = self.point(x)
            return learned
        if not bool(self.point.quantizing):
            return x
        return fake_quantize(x, self.point.scale, self.point.zero_point, self.point.scheme)


def _rounded(step: Step) -> Any:
    """`recurrent.tensors_of` with the weights that convert will store, and a gradient straight through them."""

    def tensors(module: nn.Module, layer: int, reverse: bool) -> Tensors:
        own = tensors_of(module, layer, reverse)
        names = [name for name in ("weight_ih", "weight_hh", "weight_hr") if getattr(own, name) is not None]
        return replace(own, **{name: _straight(getattr(own, name), step) for name in names})

    return tensors


def _straight(weight: Tensor, step: Step) -> Tensor:
    assert step.qconfig is not None
    return straight_through(weight, dequantized_rows(weight.detach(), step.qconfig))
