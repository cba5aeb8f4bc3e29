"""The layers of a block learned together, for what the block gives: Algorithm 1 of BRECQ (Li et al., arXiv:2102.05426).

Each layer comes with integers that were chosen for it alone. From there every weight may go up or down as in AdaRound
(`quant/rounding/adaround.py`), for the least error of the block's outputs, through its activations and their rounding.
What is learned is kept where it lowers that error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quant.graph import evaluate
from quant.observers.fake_quantize import fake_quantize
from quant.reconstruction.layers import LayerWeight
from quant.reconstruction.units import Block, is_input
from quant.reconstruction.walk import Call, Walk
from quant.rounding.adaround import PATH, regularizer, stretched, unstretched
from quant.static.runner import seen_by
from quant.static.step_simulation import weighted

STEPS = 200
"""Steps of learning of a block by default, each on one batch."""

STRENGTH = 1.0
"""Lambda, for an error that is divided by that of the integers at the start."""

LEANING = 0.8
"""h(V) at the start where a layer alone would round up; the others begin at 1 - LEANING."""


@dataclass
class _Soft:
    """A layer while it is learned: v = scale * clip(low + h(V))."""

    layer: LayerWeight
    low: Tensor
    v: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: LayerWeight, q: Tensor, bias: Tensor | None) -> _Soft:
        """Beginning at integers q, from which each weight may go to the other side of its float value."""
        real = layer.rows / layer.scale[..., None]
        up = (q > real).to(q.dtype)
        h = torch.where(up > 0, LEANING, 1.0 - LEANING)
        return cls(layer, q - up, unstretched(h).requires_grad_(), bias)

    def integers(self, h: Tensor) -> Tensor:
        top = 2 ** (self.layer.bits - 1) - 1
        return (self.low + h).clamp(-top, top)

    def hard(self) -> Tensor:
        return self.integers((stretched(self.v.detach()) >= 0.5).to(self.low.dtype))

    def weight(self, h: Tensor) -> Tensor:
        own = self.layer.step.weighted
        rows = self.integers(h) * self.layer.scale[..., None]
        return own.as_layer(rows.reshape(own.output_first(self.layer.weight).shape))


def learn_block(
    block: Block,
    walk: Walk,
    begun: list[Call],
    solutions: dict[int, tuple[LayerWeight, Tensor]],
    *,
    steps: int,
    generator: torch.Generator,
) -> tuple[dict[int, Tensor], float, float]:
    """Integers of a block's layers, for the least error of its outputs.

    Args:
        walk: at the end of the block, with the layers' own integers in its runner.
        begun: its calls as they were at the beginning of the block.
        solutions: by a step's output, the layer and its integers.
        generator: draws the batch of each step.

    Returns:
        the integers by the step's output, and the block's error with and without them.
    """
    runner = walk.runner
    outputs = [one for one in block.outputs if isinstance(walk.calls[0].real.get(one), Tensor)]
    biases = {one: runner.learned_weights[layer.step.name].bias for one, (layer, _) in solutions.items()}
    soft = {one: _Soft.of(layer, q, biases[one]) for one, (layer, q) in solutions.items()}
    before = _error(block, walk, begun, outputs)
    if not outputs or before <= 0.0:
        return {one: q for one, (_, q) in solutions.items()}, before, before
    optimizer = torch.optim.Adam([one.v for one in soft.values()], lr=PATH / steps)
    with torch.enable_grad():
        for index in range(steps):
            chosen = int(torch.randint(len(begun), (), generator=generator))
            h = {value: stretched(one.v) for value, one in soft.items()}
            values = _soft_values(block, walk, begun[chosen].copy(), soft, h)
            real = walk.calls[chosen].real
            error = torch.stack([_difference(values[one], real[one]) for one in outputs]).sum()
            pull = regularizer(torch.cat([one.flatten() for one in h.values()]), index / steps)
            optimizer.zero_grad()
            (error / before + STRENGTH * pull).backward()
            optimizer.step()
    learned = {value: one.hard() for value, one in soft.items()}
    for value, q in learned.items():
        name = solutions[value][0].step.name
        runner.learned_weights[name] = replace(solutions[value][0].layer(q), bias=biases[value])
    after = _error(block, walk, begun, outputs)
    if after < before:
        return learned, after, before
    for layer, q in solutions.values():
        runner.learned_weights[layer.step.name] = layer.layer(q)
    return {one: q for one, (_, q) in solutions.items()}, before, before


def _difference(own: Tensor, real: Tensor) -> Tensor:
    return (own - real).square().mean()


def _error(block: Block, walk: Walk, begun: list[Call], outputs: list[int]) -> float:
    """The mean square error of a block's outputs over all calls, with the integers that the runner has."""
    total = 0.0
    for start, end in zip(begun, walk.calls, strict=True):
        call = start.copy()
        walk.runner.simulate_steps(list(block.steps), call.rounded, call.both)
        total += sum(float(_difference(call.both.get(one, call.rounded[one]), end.real[one])) for one in outputs)
    return total / len(begun)


def _soft_values(block: Block, walk: Walk, call: Call, soft: dict[int, _Soft], h: dict[int, Tensor]) -> dict[int, Any]:
    """The values of a block's steps with soft integers, and with gradients."""
    runner, fused = walk.runner, walk.runner.fused
    both = fused.read_both_ways()
    for step in block.steps:
        seen = seen_by(step, call.rounded, call.both)
        if step.output in soft:
            own = soft[step.output]
            call.rounded[step.output] = weighted(step, seen[step.inputs[0]], own.weight(h[step.output]), own.bias)
        elif step.integer and step.qconfig is not None:
            call.rounded.update(runner.simulated(step, seen.__getitem__, call.rounded.__getitem__))
        elif not is_input(step, fused):
            inner: dict[int, Any] = {}
            for index in step.nodes:
                node = runner.graph.nodes[index]
                inner[index] = evaluate(node, runner.root, {**seen, **inner}.__getitem__)
            call.rounded[step.output] = inner[step.output]
        slot = fused.slot_of.get(step.output)
        value = call.rounded.get(step.output)
        if slot is not None and isinstance(value, Tensor):
            qparams = runner.qparams(slot)
            rounded = fake_quantize(value, qparams.scale, qparams.zero_point, qparams.scheme)
            (call.both if step.output in both else call.rounded)[step.output] = rounded
    return {**call.rounded, **call.both}
