"""Convolutions for backends that have only a product: a group's windows as rows, multiplied by its weight as rows.

The sums are those of `reference_conv.conv_u8s8_s32`, whatever order the product adds them in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from quant.kernels.per_weight import PerWeight
from quant.kernels.reference import MAX_K, Product
from torch import Tensor

FEWEST_CHANNELS = 16
"""Input channels of a group from which rows are worth it: each group is a product of its own, of one output where the
convolution is depthwise. With oneDNN, 8 groups of 16 take as long as the reference's float64, groups of 32 take a half,
and one group a thirtieth."""

MOST_BYTES = 1 << 26
"""Of windows as rows at a time: those of a kernel of 3 x 3 are nine times the image."""


class Matrices:
    """The weights of convolutions as matrices (out / groups, K), one a group, each row as kernel..., channels.

    They are kept, because a backend packs a matrix once and finds the packed form by the tensor.
    """

    def __init__(self) -> None:
        self._kept: PerWeight[list[Tensor]] = PerWeight()

    def of(self, q_weight: Tensor, groups: int) -> list[Tensor]:
        """The matrices of an int8 weight (out, in / groups, kernel...)."""
        return self._kept.get(q_weight, lambda: _matrices(q_weight, groups))


def _matrices(q_weight: Tensor, groups: int) -> list[Tensor]:
    # Of `data`, because other views hold the weight itself, which would then never die.
    return [part.movedim(1, -1).flatten(1).contiguous() for part in q_weight.data.chunk(groups)]


def why_not(q_weight: Tensor, groups: int) -> str:
    """'' where this pays for a weight (out, in / groups, kernel...); else the kind of convolution, as the reason."""
    channels, depth = q_weight.shape[1], math.prod(q_weight.shape[1:])
    if q_weight.numel() == 0:
        return "a convolution without weights"
    if groups > 1 and channels < FEWEST_CHANNELS:
        return f"a convolution of {groups} groups of {channels} input channels"
    return f"a convolution of {depth} products a sum" if depth > MAX_K else ""


def conv_u8s8_s32(
    q_x: Tensor,
    zero_point: int,
    q_weight: Tensor,
    q_bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    rows: Sequence[Tensor],
    product: Product,
) -> Tensor:
    """`reference_conv.conv_u8s8_s32`.

    Args:
        q_x, ...: as `reference_conv.check_conv` wants them.
        rows: q_weight as `Matrices` gives it.
        product: exact.

    Returns:
        int32, (N, out, spatial...), with the channels innermost in memory.
    """
    # What is padded holds the zero point, which equation 6 then removes: a real zero.
    widths = [width for pad in reversed(list(padding)) for width in (pad, pad)]
    windows = _windows(F.pad(q_x, widths, value=zero_point), q_weight.shape[2:], stride, dilation)
    bytes_each = math.prod(windows.shape[1:])
    images = windows.split(max(1, MOST_BYTES // max(bytes_each, 1)))
    sums = torch.cat([_products(some, rows, product) for some in images])
    offset = -zero_point * torch.cat([one.sum(dim=1, dtype=torch.int32) for one in rows])
    return (sums + (offset if q_bias is None else offset + q_bias)).movedim(-1, 1)


def _windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """(N, C, spatial...) -> (N, places..., kernel..., C), a view of the image with its channels innermost.

    Values copied together are then contiguous.
    """
    x = x.movedim(1, -1).contiguous()
    for place, (taps, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(1 + place, (taps - 1) * apart + 1, step)[..., ::apart]
    return x.movedim(1 + len(kernel), -1)


def _products(windows: Tensor, rows: Sequence[Tensor], product: Product) -> Tensor:
    """int32 (N, places..., out)."""
    dims = (windows.dim() - 2) // 2
    places = windows.shape[: 1 + dims]
    if math.prod(places) == 0:
        return torch.zeros(*places, sum(one.shape[0] for one in rows), dtype=torch.int32)
    parts = windows.chunk(len(rows), dim=-1)
    sums = [product(part.reshape(-1, one.shape[1]).contiguous(), one) for part, one in zip(parts, rows, strict=True)]
    return torch.cat(sums, dim=1).reshape(*places, -1)
