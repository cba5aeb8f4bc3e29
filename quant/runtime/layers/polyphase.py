"""Computes a transposed convolution by an ordinary one, for which there are kernels, and reorders the outputs.

With stride s, the outputs at r, r + s, r + 2 s, ... are a convolution of stride 1 with the taps r, r + s, ... of the
kernel. All phases r together are one convolution with s times as many output channels, per dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from quant.kernels.reference_plan import Register
from quant.runtime.layers.products import ConvProduct, TransposedProduct


class Polyphase:
    """The operands of an ordinary convolution whose sums equal those of a transposed one bit for bit.

    Attributes:
        q_weight: int8, (groups * phases * out / groups, in / groups, taps...), from (in, out / groups, kernel...). The
            channels of a phase lie side by side, so that to put phases in order moves whole pixels.
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
        self.groups = groups
        self.q_weight = _by_phase(q_weight, taps, stride, groups)
        ones = [1] * len(taps)
        self.q_bias = None if q_bias is None else self._for_phases(q_bias)
        self.multiplier = self._for_phases(multiplier)
        self.product = ConvProduct(ones, [tap - 1 for tap in taps], ones, groups)
        self.settings = tuple(self.product.settings.values())

    def in_order(self, y: Tensor, sizes: Sequence[int]) -> Tensor:
        """The outputs (N, out, ...), in order, of those by phase; `sizes` are the input's, (H, W) of an image."""
        rank = len(sizes)
        y = y.reshape(y.shape[0], *self._channels, *y.shape[2:])
        turned = (place for d in range(rank) for place in (3 + rank + d, 2 + d))
        y = y.permute(0, 1, 2 + rank, *turned).flatten(1, 2)
        for d in range(rank):
            y = y.flatten(2 + d, 3 + d)
            y = y.narrow(2 + d, self.padding[d], sizes[d] * self.stride[d] + self.beyond[d])
        return y.contiguous()

    @property
    def _channels(self) -> tuple[int, ...]:
        """The groups, the phases of each dimension, and the outputs of a phase in a group."""
        phases = self.groups * math.prod(self.stride)
        return self.groups, *self.stride, self.q_weight.shape[0] // phases

    def _for_phases(self, values: Tensor) -> Tensor:
        """A value for each output channel, (out,), for each of those by phase."""
        return values.reshape(self.groups, 1, -1).repeat(1, math.prod(self.stride), 1).flatten()

    def moves(self, y: Register) -> list[tuple[str, dict[str, Any]]]:
        """`in_order` of a plan's value as operations with their settings, each of the value before it."""
        # With the channels last, the first flatten copies, and all the others look at what it wrote in another way.
        rank = len(self.stride)
        sizes = [Register(y.index, 2 + d) for d in range(rank)]
        shape = (Register(y.index, 0), *self._channels, *sizes)
        dims = (0, *(place for d in range(rank) for place in (3 + rank + d, 2 + d)), 1, 2 + rank)
        lines: list[tuple[str, dict[str, Any]]] = [("reshape", {"shape": shape}), ("permute", {"dims": dims})]
        lines += [("flatten", {"start": 1 + d, "end": 2 + d}) for d in range(rank + 1)]
        lines.append(("permute", {"dims": (0, 1 + rank, *range(1, 1 + rank))}))
        for d in range(rank):
            # Of (size + taps - 1) * stride values are read those from `padding` on, size * stride + beyond of them.
            cut = (self.q_weight.shape[2 + d] - 1) * self.stride[d] - self.padding[d] - self.beyond[d]
            if self.padding[d] or cut:
                ends = {"start": self.padding[d], "end": -cut if cut else None}
                lines.append(("slice", {"dim": 2 + d, **ends, "step": 1}))
        return lines


def _by_phase(q_weight: Tensor, taps: Sequence[int], stride: Sequence[int], groups: int) -> Tensor:
    rank = len(taps)
    missing = [t * s - k for t, s, k in zip(taps, stride, q_weight.shape[2:], strict=True)]
    padded = F.pad(q_weight, [width for count in reversed(missing) for width in (0, count)])
    split = padded.reshape(groups, -1, q_weight.shape[1], *(n for pair in zip(taps, stride, strict=True) for n in pair))
    tap_dims, phase_dims = range(3, 3 + 2 * rank, 2), range(4, 4 + 2 * rank, 2)
    ordered = split.flip(list(tap_dims)).permute(0, *phase_dims, 2, 1, *tap_dims)
    return ordered.reshape(-1, q_weight.shape[0] // groups, *taps).contiguous()
