"""AdaRound: whether each weight is rounded up or down is learned, for the least error of the layer's output.

Nagel et al. 2020 (arXiv:2004.10568), equations 21 to 25. A weight is

    v = s * clip(floor(w / s) + h(V), bottom, top)                      (22)
    h(V) = clip(sigmoid(V) * 1.2 - 0.1, 0, 1)                           (23)

and V is learned for the least

    error(v) + lambda * sum(1 - |2 h(V) - 1|**beta)                     (21, 24)

whose second term, with beta falling from 20 to 2, brings each h to 0 or 1. Here the error is equation R1: that of all
data, behind rounded layers (equation 25 without the activation), at the price of one product of matrices a step.
`quant/reconstruction/blocks.py` learns the same V through several layers and what stands between them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quant.rounding.descent import output_error
from quant.rounding.grid import Grid

ZETA, GAMMA = 1.1, -0.1
"""The stretch of the sigmoid: h reaches 0 and 1, where its gradient is not lost (equation 23)."""

BETAS = (20.0, 2.0)
"""The exponent at the start and at the end (section 5 there)."""

WARM_UP = 0.2
"""The share of steps without the second term."""

STEPS = 300
"""Steps of learning by default."""

PATH = 10.0
"""Steps times learning rate: far enough for a V to go from one side of h to the other. 10,000 steps have the rate
0.001."""

STRENGTH = 10.0
"""Lambda for an error that is divided by that of rounding to nearest, and a mean over weights instead of a sum."""


def stretched(v: Tensor) -> Tensor:
    """h(V), equation 23."""
    return (torch.sigmoid(v) * (ZETA - GAMMA) + GAMMA).clamp(0.0, 1.0)


def unstretched(h: Tensor) -> Tensor:
    """The V whose h(V) is h, of values in [0, 1]."""
    return torch.logit((h - GAMMA) / (ZETA - GAMMA))


def regularizer(h: Tensor, done: float) -> Tensor:
    """The mean of 1 - |2 h - 1|**beta (equation 24); 0 in the warm-up.

    Args:
        h: in [0, 1].
        done: the share of the steps that are behind, in [0, 1].
    """
    if done < WARM_UP:
        return h.new_zeros(())
    first, last = BETAS
    beta = last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * (done - WARM_UP) / (1.0 - WARM_UP)))
    return (1.0 - (2.0 * h - 1.0).abs().pow(beta)).mean()


def adaround(
    weight: Tensor,
    scale: Tensor,
    hessian: Tensor,
    *,
    bits: int,
    steps: int = STEPS,
    zero_point: Tensor | None = None,
) -> Tensor:
    """The integers of a weight, each rounded up or down.

    Args:
        weight: float (..., rows, K), finite; the target t of equation R1.
        scale, bits, zero_point: as for `Grid.of`.
        hessian: as for `output_error`.
        steps: of Adam, on all data at once.

    Returns:
        float of the weight's shape, whole numbers. Nothing is drawn: the same inputs give the same integers.
    """
    grid = Grid.of(weight, scale, bits, zero_point)
    by = grid.step
    low, nearest = torch.floor(weight / by), grid.nearest(weight)
    # Rows are problems of their own: each error is divided by that of rounding to nearest, for one lambda to serve all.
    size = output_error(weight, nearest * by, hessian)[..., None] * (weight.numel() / weight.shape[-1])
    size = size.clamp(min=torch.finfo(size.dtype).tiny)
    v = unstretched((weight / by - low).clamp(0.0, 1.0)).requires_grad_()
    optimizer = torch.optim.Adam([v], lr=PATH / steps)
    with torch.enable_grad():
        for index in range(steps):
            h = stretched(v)
            rounded = grid.clamped(low + h) * by
            gradient = 2.0 * ((rounded.detach() - weight) @ hessian) / size
            # Its gradient is the error's, for one product instead of three.
            loss = (rounded * gradient).sum() + STRENGTH * regularizer(h, index / steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    up = (stretched(v.detach()) >= 0.5).to(weight.dtype)
    return grid.clamped(low + up)
