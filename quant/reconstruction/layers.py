"""One layer rounded anew: its scale, integers and bias by the second moments of what it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.ops.step import Step
from quant.reconstruction.moments import Moments, groups_of, input_rows
from quant.reconstruction.walk import Walk
from quant.rounding.gptq import DAMPING
from quant.rounding.methods import Choice, choose_integers
from quant.runtime.layers.weighted import QWeight
from quant.static.weights import folded, row_scale


@dataclass(frozen=True)
class LayerWeight:
    """A weighted step's folded float weight, and what is known for its rounding.

    Attributes:
        weight: float32, in the layer's layout.
        rows: the same as float32 (groups, rows, K).
        bias: float32 (groups * rows,), or None.
        scale: float32 (groups, rows).
        moments: of its input.
        corrected: whether its bias takes the mean error.
    """

    step: Step
    weight: Tensor
    rows: Tensor
    bias: Tensor | None
    scale: Tensor
    moments: Moments
    corrected: bool

    @property
    def bits(self) -> int:
        """Of the weight."""
        assert self.step.qconfig is not None
        return self.step.qconfig.weight_bits

    def quadratic(self) -> tuple[Tensor, Tensor]:
        """H and C of equation R1, damped alike, so that the weight itself is where nothing pulls."""
        hessian, cross = self.moments.centered() if self.corrected else self.moments.plain()
        added = DAMPING * hessian.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-12)
        eye = torch.eye(hessian.shape[1]) * added[:, None, None]
        return hessian + eye, cross + eye

    def layer(self, q: Tensor) -> QWeight:
        """The int8 weight with these integers, in the layer's layout."""
        weighted = self.step.weighted
        shape = weighted.output_first(self.weight).shape
        q_weight = weighted.as_layer(q.reshape(shape).to(torch.int8)).contiguous()
        bias = None if self.bias is None else self.bias.clone()
        if self.corrected:
            own, real = self.moments.means()
            wanted = (self.rows @ real[..., None])[..., 0]
            shift = wanted - ((q * self.scale[..., None]) @ own[..., None])[..., 0]
            assert bias is not None
            bias += shift.reshape(-1)
        return QWeight(q_weight, self.scale.reshape(-1), bias)


def layer_weight(step: Step, walk: Walk, seed: int) -> LayerWeight:
    """What is known of a weighted step for its rounding, with all calls of the walk at the step.

    Raises:
        ValueError: its input holds no finite row; or its weight NaN or inf, with the layer's name.
    """
    runner = walk.runner
    weight, bias = folded(step, runner.graph, runner.root)
    weight = weight.detach().to(torch.float32)
    bias = None if bias is None else bias.detach().to(torch.float32)
    kernel, groups = tuple(weight.shape[2:]), groups_of(step)
    flat = step.weighted.output_first(weight)
    rows = flat.reshape(groups, flat.shape[0] // groups, -1)
    moments = Moments.empty(groups, rows.shape[2])
    generator = torch.Generator().manual_seed(seed)
    for rounded, real in walk.inputs(step):
        state = generator.get_state()
        own = input_rows(step, rounded.to(torch.float32), kernel, generator)
        generator.set_state(state)
        moments.add(own, input_rows(step, real.to(torch.float32), kernel, generator))
    if not moments.rows:
        raise ValueError(
            f"layer '{step.name}': no finite values came to it; give batches of real inputs, not empty and without NaN"
        )
    hessian = moments.plain()[0]
    importance = hessian.diagonal(dim1=1, dim2=2).repeat_interleave(rows.shape[1], 0)
    smallest = runner.input_scales(step)[-1]  # type: ignore[misc]
    scale = row_scale(flat, bias, smallest, step, importance=importance.reshape(flat.shape[0], *flat.shape[1:]))
    assert step.qconfig is not None
    corrected = step.qconfig.bias_correction and bias is not None
    return LayerWeight(step, weight, rows, bias, scale.reshape(groups, -1), moments, corrected)


def solved(layer: LayerWeight, method: str, steps: int | None) -> Choice:
    """A layer's integers by a method, with q of the rows' shape."""
    hessian, cross = layer.quadratic()
    # Equation R1. What the float layer gives is out of reach behind rounded inputs; the closest weight is not.
    best = torch.linalg.solve(hessian.double(), cross.double().transpose(1, 2) @ layer.rows.double().transpose(1, 2))
    target = best.transpose(1, 2).to(torch.float32)
    return choose_integers(method, layer.rows, layer.scale, hessian, target, bits=layer.bits, steps=steps)
