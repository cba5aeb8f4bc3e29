"""Computes a transposed convolution by an ordinary one, for which there are kernels, and reorders the outputs.

With stride s, the outputs at r, r + s, r + 2 s, ... are a convolution of stride 1 with the taps r, r + s, ... of the
kernel. All phases r together are one convolution with s times as many output channels, per dimension.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from quant.kernels.reference_plan import Register
from quant.runtime.layers.products import ConvProduct, TransposedProduct


class Polyphase:
    """The operands of an ordinary convolution whose sums equal those of a transposed one bit for bit.

    Channels stand by group, phase and output, so that the outputs of a phase lie side by side where channels are last.

    Attributes:
        q_weight: int8, (groups * phases * out / groups, in / groups, taps...), from (in, out / groups, kernel...).
        q_bias, multiplier: those of the transposed convolution, repeated for each phase.
        product: the convolution.
    """

    def __init__(self, product: TransposedProduct, q_weight: Tensor, q_bias: Tensor | None, multiplier: Tensor) -> None:
        groups, stride, padding = product.groups, product.stride, product.padding
        kernel, more = q_weight.shape[2:], product.output_padding
        taps = [max(math.ceil(k / s), math.ceil((k + extra - p) / s))
                for k, s, p, extra in zip(kernel, stride, padding, more, strict=True)]  # fmt: skip
        self.stride, self.padding = tuple(stride), tuple(padding)
        self.beyond = [k - s - 2 * p + extra for k, s, p, extra in zip(kernel, stride, padding, more, strict=True)]
        self.q_weight = _by_phase(q_weight, taps, stride, groups)
        self.groups, self.outputs, self.taps, ones = groups, q_weight.shape[1], taps, [1] * len(taps)
        self.q_bias = None if q_bias is None else self._for_each_phase(q_bias)
        self.multiplier = self._for_each_phase(multiplier)
        self.product = ConvProduct(ones, [tap - 1 for tap in taps], ones, groups)
        self.settings = tuple(self.product.settings.values())

    def _for_each_phase(self, values: Tensor) -> Tensor:
        shape = self.groups, math.prod(self.stride), self.outputs
        return values.reshape(self.groups, 1, self.outputs).expand(shape).reshape(-1)

    def scaled(self, factor: float) -> Polyphase:
        """The same operands with other multipliers and no bias."""
        other = copy.copy(self)
        other.q_bias, other.multiplier = None, self.multiplier * factor
        return other

    def in_order(self, y: Tensor, sizes: Sequence[int]) -> Tensor:
        """The outputs (N, out, ...) of phases (N, out * phases, ...); `sizes` are the input's, (H, W) of an image."""
        rank = len(sizes)
        y = y.reshape(y.shape[0], self.groups, *self.stride, self.outputs, *y.shape[2:])
        y = y.permute(0, 1, 2 + rank, *(place for d in range(rank) for place in (3 + rank + d, 2 + d))).flatten(1, 2)
        for d in range(rank):
            y = y.flatten(2 + d, 3 + d)
            y = y.narrow(2 + d, self.padding[d], sizes[d] * self.stride[d] + self.beyond[d])
        return y.contiguous()

    def moves(self, y: Register) -> list[tuple[str, dict[str, Any]]]:
        """The same as operations of a plan, each on the result of the one before; `y` has the phases.

        Channels stay last while phases take their places, so that whole pixels are copied.
        """
        rank = len(self.stride)
        sizes = [Register(y.index, 2 + d) for d in range(rank)]
        places = [place for d in range(rank) for place in (3 + rank + d, 2 + d)]
        split = (Register(y.index, 0), self.groups, *self.stride, self.outputs, *sizes)
        moves: list[tuple[str, dict[str, Any]]] = [
            ("reshape", {"shape": split}),
            ("permute", {"dims": (0, *places, 1, 2 + rank)}),
            *(("flatten", {"start": 1 + d, "end": 2 + d}) for d in range(rank + 1)),
            ("permute", {"dims": (0, 1 + rank, *range(1, 1 + rank))}),
        ]
        for d, (tap, s, p, beyond) in enumerate(zip(self.taps, self.stride, self.padding, self.beyond, strict=True)):
            surplus = (tap - 1) * s - p - beyond
            if p or surplus:
                moves.append(("slice", {"dim": 2 + d, "start": p, "end": -surplus if surplus else None, "step": 1}))
        return moves


def _by_phase(q_weight: Tensor, taps: Sequence[int], stride: Sequence[int], groups: int) -> Tensor:
    rank = len(taps)
    missing = [t * s - k for t, s, k in zip(taps, stride, q_weight.shape[2:], strict=True)]
    padded = F.pad(q_weight, [width for count in reversed(missing) for width in (0, count)])
    split = padded.reshape(groups, -1, q_weight.shape[1], *(n for pair in zip(taps, stride, strict=True) for n in pair))
    tap_dims, phase_dims = range(3, 3 + 2 * rank, 2), range(4, 4 + 2 * rank, 2)
    ordered = split.flip(list(tap_dims)).permute(0, *phase_dims, 2, 1, *tap_dims)
    return ordered.reshape(-1, q_weight.shape[0] // groups, *taps).contiguous()
