"""What an observer counts of a tensor, in plain torch, on any device; the oracle of the compiled operator."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 65536
"""Values counted at a time: the temporaries (6 bytes a value) stay in a core's L2 cache."""


def histogram(x: Tensor, width: float, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Extremes, counts of what is not finite, and a histogram of the finite values, anchored at zero.

    Value v falls into bin trunc(v / width) + bins / 2; one that lies beyond the grid counts in the bin at its end.

    Args:
        x: float32 (n,).
        width: of a bin, a power of two from 2**-126 to 2**126, so that v / width is exact.
        bins: an even number from 2 to 32768.

    Returns:
        float32 (2,): the smallest and largest finite value; (inf, -inf) where there is none.
        int64 (2,): how many are NaN, and infinite.
        int64 (bins,): the histogram.
    """
    nan, inf = torch.isnan(x).sum(), torch.isinf(x).sum()
    finite = x[torch.isfinite(x)] if nan or inf else x
    low, high = torch.aminmax(finite) if finite.numel() else (x.new_tensor(torch.inf), x.new_tensor(-torch.inf))
    return torch.stack((low, high)), torch.stack((nan, inf)), _counts(finite, width, bins)


def _counts(finite: Tensor, width: float, bins: int) -> Tensor:
    half = bins // 2
    counts = torch.zeros(bins, dtype=torch.int64, device=finite.device)
    for chunk in torch.split(finite, CHUNK):
        # The width is a power of two: the product is exact, or so small that it truncates to 0, or beyond the grid.
        scaled = (chunk * (1.0 / width)).clamp_(-half, half - 1)
        # int16 converts and counts two to four times faster than int32 or int64, and torch.histc is five times slower.
        counts += torch.bincount(scaled.to(torch.int16).add_(half), minlength=bins)
    return counts
