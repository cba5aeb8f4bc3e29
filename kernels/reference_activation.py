"""What calibration keeps of activations besides a histogram, in plain torch; the oracle of the compiled pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from quant.kernels.reference_histogram import observe_histogram
from torch import Tensor


def channel_sums(x: Tensor, axis: int) -> Tensor:
    """The sum of each index of `axis`, float32 (channels,): added up in double and rounded once, so that any order of
    adding gives the same but for a double sum next to the middle of two float32. What is not finite counts as 0.

    Args:
        x: float32, any shape.
        axis: of the channels; may count from the end.
    """
    others = [dim for dim in range(x.dim()) if dim != axis % x.dim()]
    finite = x.double().nan_to_num(0.0, 0.0, 0.0)
    return (finite.sum(others) if others else finite).to(torch.float32)


def observe_activation(
    x: Tensor,
    axis: int,
    low: Tensor,
    high: Tensor,
    nan_count: Tensor,
    inf_count: Tensor,
    counts: Tensor,
    means: Sequence[Tensor],
) -> None:
    """Add values to what an observer keeps of the whole tensor, and the sums of their channels to what means keep.

    Args:
        x: float32, any shape.
        axis: of the channels.
        low, high, nan_count, inf_count, counts: as for `observe_histogram`, of one row; changed in place.
        means: for each mean its total, float64 (channels,), its count of values per channel, int64 (), and the smallest
            and largest sum so far, float32 (1,); changed in place.
    """
    if x.numel() == 0:
        return
    observe_histogram(x.reshape(1, -1), low, high, nan_count, inf_count, counts)
    if means:
        add_sums(channel_sums(x, axis), x.numel() // x.shape[axis], means)


def add_sums(sums: Tensor, count: int, means: Sequence[Tensor]) -> None:
    """Add the sums of one tensor's channels, of `count` values each, to means."""
    least, most = torch.aminmax(sums)
    for total, number, low, high in zip(means[::4], means[1::4], means[2::4], means[3::4], strict=True):
        total += sums
        number += count
        torch.minimum(low, least, out=low)
        torch.maximum(high, most, out=high)


def observe_normalized(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    contracted: bool,
    least: float,
    most: float,
    low: Tensor,
    high: Tensor,
    nan_count: Tensor,
    inf_count: Tensor,
    counts: Tensor,
    means: Sequence[Tensor],
) -> None:
    """A batch norm of inference and a clamp, in place, and `observe_activation` of the result.

    Args:
        x: float32 (batch, channels, ...), contiguous; changed in place.
        mean, variance: float32 (channels,); None for no batch norm.
        weight, bias: float32 (channels,), or None.
        contracted: whether the compiled pass rounds x * scale only with the sum; here torch's own kernel decides.
        least, most: the clamp; -inf and inf for none. NaN stays NaN.
    """
    y = x if mean is None or variance is None else F.batch_norm(x, mean, variance, weight, bias, eps=eps)
    x.copy_(y if least == -math.inf and most == math.inf else y.clamp(least, most))
    observe_activation(x, 1, low, high, nan_count, inf_count, counts, means)
