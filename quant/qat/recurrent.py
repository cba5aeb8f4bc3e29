"""Training of recurrent layers: the float loop over time with rounded weights, inputs and states.

States are rounded by the layer's range at the beginning of the sequence. The range follows the states of whole
sequences, which torch's own kernels compute first: the first state is all zeros, which is no range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quant.graph import call_module
from quant.observers.fake_quantize import FakeQuantize, fake_quantize
from quant.ops.operator import Recurrent
from quant.ops.step import Step
from quant.qat.fake_quantizers import SharedFakeQuantize
from quant.qat.weights import straight_through
from quant.recurrent_layers import Tensors, directions_of, tensors_of
from quant.runtime.names import attribute
from quant.runtime.trees import map_leaves
from quant.static.recurrent_float import observe, run_float
from quant.static.runner import GraphRunner
from quant.static.step_simulation import recurrent_call
from quant.static.weights import dequantized_rows


def trained(
    runner: GraphRunner,
    step: Step,
    values: dict[int, Any],
    states: dict[int, Any],
    *,
    rounding: bool,
    number: Callable[[str, int], int],
) -> dict[int, Any]:
    """The values of a recurrent step, by node: its result, and the output sequence, rounded where integers read it.

    Args:
        values: of the nodes before, as the input's products read them.
        states: the same, as the layer carries them on.
        rounding: round the weights.
        number: as `TrainingRunner.number`.
    """
    node = runner.graph.nodes[step.nodes[0]]
    module = attribute(runner.root, node.target)
    input, hx = recurrent_call(node, runner.root, values.__getitem__, states.__getitem__)
    args = (input,) if hx is None else (input, hx)
    ranges = {
        name: _InnerRange(runner, slot, (node.target, name), number)
        for name, slot in runner.fused.inner_slots(step).items()
    }
    weights = _rounded(step, module) if rounding else {}
    result: Any = None
    if runner.training or not (rounding or any(one.quantizing for one in ranges.values())):
        result = call_module(runner.root, node.target, args, {})
        if runner.training:
            observe(module, args, {}, map_leaves(_detached, result), lambda name, x: ranges[name].look(x))
    if rounding or any(one.quantizing for one in ranges.values()):
        result = run_float(
            module,
            input,
            hx,
            lambda name, x: ranges[name].round(x),
            lambda module, layer, reverse: weights.get((layer, reverse)) or tensors_of(module, layer, reverse),
        )
    if len(step.nodes) == 1:
        return {node.index: result}
    assert isinstance(step.operator, Recurrent)
    y = ranges[step.operator.ranges[-1]].round(result[0]) if runner.fused.emits_integers(step) else result[0]
    return {node.index: result, step.output: y}


class _InnerRange:
    """A fake quantiser that observes whole sequences and rounds single steps."""

    def __init__(self, runner: GraphRunner, slot: str, key: tuple[str, str], number: Callable[[str, int], int]) -> None:
        self.quantizer: Any = runner.observer(slot)
        shared = runner.fused.slots[slot]
        self.number = number(slot, len(shared.observed) + shared.inner.index(key))

    @property
    def quantizing(self) -> bool:
        return bool(self.quantizer.quantizing)

    def look(self, x: Tensor) -> Tensor:
        shared = isinstance(self.quantizer, SharedFakeQuantize)
        seen: Tensor = self.quantizer.at(self.number, x) if shared else self.quantizer(x)
        return seen

    def round(self, x: Tensor) -> Tensor:
        if not isinstance(self.quantizer, FakeQuantize):
            learned: Tensor = self.quantizer(x)
            return learned
        if not self.quantizing:
            return x
        return fake_quantize(x, self.quantizer.scale, self.quantizer.zero_point, self.quantizer.scheme)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _rounded(step: Step, module: nn.Module) -> dict[tuple[int, bool], Tensors]:
    """The parameters by layer and direction, with weights rounded as convert will; gradients go straight through.

    Raises:
        ValueError: a weight holds NaN or inf; with the layer's name.
    """
    tensors = {}
    for place in directions_of(module):
        own = tensors_of(module, *place)
        names = [name for name in ("weight_ih", "weight_hh", "weight_hr") if getattr(own, name) is not None]
        tensors[place] = replace(own, **{name: _straight(getattr(own, name), step) for name in names})
    return tensors


def _straight(weight: Tensor, step: Step) -> Tensor:
    assert step.qconfig is not None
    if not bool(torch.isfinite(weight.sum())):
        raise ValueError(
            f"layer '{step.name}': its weight holds NaN or inf, expected finite values; check the training"
        )
    return straight_through(weight, dequantized_rows(weight.detach(), step.qconfig))
