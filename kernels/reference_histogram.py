"""What an observer counts of a tensor, in plain torch, on any device; the oracle of the compiled operator."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK = 65536
"""Values counted at a time: the temporaries (6 bytes a value) stay in a core's L2 cache."""

EXPONENT_MIN = -126
"""Of a bin's width: the reciprocal of a smaller one overflows float32."""


def observe_histogram(
    x: Tensor, low: Tensor, high: Tensor, nan_count: Tensor, inf_count: Tensor, counts: Tensor
) -> None:
    """Add values to what an observer keeps of each row: extremes, and counts on a grid that widens where it has to.

    The width of a row's bins is 2**grid_exponent of the largest magnitude so far.

    Args:
        x: float32 (rows, n).
        low, high: float32 (rows,), the extremes so far, changed in place; inf and -inf where nothing was seen.
        nan_count, inf_count: int64 (), of all rows, changed in place.
        counts: int64 (rows, bins), changed in place.
    """
    for row, ends in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        extremes, non_finite = _count(x[row], exponent_for(*ends, counts.shape[1]), counts[row])
        torch.minimum(low[row], extremes[0], out=low[row])
        torch.maximum(high[row], extremes[1], out=high[row])
        nan_count += non_finite[0]
        inf_count += non_finite[1]


def _count(x: Tensor, exponent: int | None, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Add a row to its counts, widened to a grid that it fits; returns its extremes, and what was not finite."""
    bins = counts.numel()
    extremes, non_finite, added = histogram(x, 2.0 ** (EXPONENT_MIN if exponent is None else exponent), bins)
    least, most = extremes.tolist()
    needed = exponent_for(least, most, bins)
    if needed is not None and (exponent is None or needed > exponent):
        # Seldom: the first batch, and one that holds values of a size not seen before.
        added = histogram(x, 2.0**needed, bins)[2]
        if exponent is not None:
            counts.copy_(widen(counts, needed - exponent))
    counts += added
    return extremes, non_finite


def exponent_for(low: float, high: float, bins: int) -> int | None:
    """log2 of the bin width that [low, high] needs; None where low > high, the sign of no data."""
    return grid_exponent(max(-low, high), bins) if low <= high else None


def grid_exponent(bound: float, bins: int) -> int:
    """The smallest e >= EXPONENT_MIN with bound < bins / 2 * 2**e; bound is finite and not negative."""
    if bound == 0.0:  # frexp gives 0 an exponent of 0, and the bins of all-zero data must be narrower than any other
        return EXPONENT_MIN
    return max(math.frexp(bound)[1] - (bins // 2).bit_length() + 1, EXPONENT_MIN)


def widen(counts: Tensor, doublings: int) -> Tensor:
    """The same counts (bins,) on bins 2**doublings times as wide; exact."""
    if doublings == 0:
        return counts
    half = counts.numel() // 2
    s = torch.arange(-half, half, device=counts.device)
    # Beyond log2(bins) doublings everything is in bin 0, and a larger shift would leave int64.
    target = torch.div(s, 2 ** min(doublings, 32), rounding_mode="trunc") + half
    return torch.zeros_like(counts).index_add_(0, target, counts)


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

    Raises:
        ValueError: the width or the number of bins is another.
    """
    if not 2 <= bins <= 32768 or bins % 2:
        raise ValueError(f"bins is {bins}, expected an even number from 2 to 32768")
    mantissa, exponent = math.frexp(width)
    if mantissa != 0.5 or not -125 <= exponent <= 127:
        raise ValueError(f"width is {width:g}, expected a power of two from 2**-126 to 2**126")
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
