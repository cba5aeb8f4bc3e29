"""What calibration has not seen: the values beyond the extremes of a sample that the next sample will bring.

The largest of n values is beaten by one of the next n on average, whatever their distribution. By how much, their tail
says: beyond a high threshold the excess of most distributions is nearly exponential (Pickands 1975), and its mean
beta is that of the largest values seen over the next one. A range that ends d above the largest value seen then clips

    E (excess - d)^2 =  2 beta^2 exp(-d / beta)         d >= 0
                        2 beta^2 - 2 beta d + d^2       d < 0

on average, once in n values. In a hundred thousand values the rounding of the others outweighs it. In some hundred it
decides: 512 values of a Gaussian end at 3.1 standard deviations, and what the next 512 lose beyond is ten times what
rounding to 8 bits loses in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from quant.observers._histogram_store import RowView
from torch import Tensor

LARGEST = (4, 8, 16)
"""Numbers of values that the tail is estimated from, of which the shortest tail counts: where the values thin out fast,
as those of a uniform distribution, or some are far from the rest, many would make it too long. Where four are equal, as
behind a clamp, nothing lies beyond."""

FURTHEST = 4.0
"""Times beta that a range may reach beyond what was seen; there the clipping is exp(-4), 2 % of that at the extreme."""

WIDEST = 0.25
"""Share of the width seen that it may reach beyond: rounding is coarser by 2 dB then, and the tail is but a guess."""


@dataclass(frozen=True)
class Unseen:
    """The tails beyond a row's extremes.

    Attributes:
        low, high: the extremes.
        below, above: beta of either tail, not negative; 0 where nothing lies beyond.
    """

    low: float
    high: float
    below: float = 0.0
    above: float = 0.0

    @classmethod
    def beyond(cls, row: RowView) -> Unseen:
        """As estimated from a histogram, whose values on either side of zero are apart: those between are all inside of
        every range."""
        positive, negative = row.signed > 0, row.signed < 0
        above = _mean_excess(row.centers[positive].flip(0), row.counts[positive].flip(0))
        below = _mean_excess(-row.centers[negative], row.counts[negative])
        return cls(row.low, row.high, below, above)

    def limits(self) -> tuple[float, float]:
        """The widest range worth a look."""
        most = WIDEST * (max(self.high, 0.0) - min(self.low, 0.0))
        return self.low - min(FURTHEST * self.below, most), self.high + min(FURTHEST * self.above, most)

    def error(self, low: Tensor, high: Tensor) -> Tensor:
        """What ranges clip of one value beyond either end, float64 (candidates,)."""
        return _clipped(self.low - low, self.below) + _clipped(high - self.high, self.above)


def _mean_excess(values: Tensor, counts: Tensor) -> float:
    """Of the largest values over the next one, the centres of bins in falling order standing for their values."""
    used = counts > 0
    values, ranks = values[used], counts[used].cumsum(0)
    if not values.numel():
        return 0.0
    taken = torch.arange(1, LARGEST[-1] + 2).clamp(max=int(ranks[-1]))
    largest = values[torch.searchsorted(ranks, taken)]
    return min(float((largest[:count] - largest[count]).mean()) for count in LARGEST)


def _clipped(room: Tensor, beta: float) -> Tensor:
    """E (excess - room)^2, float64; negative room is that of a range which ends before the extreme."""
    if beta == 0.0:
        return torch.zeros_like(room)
    beyond = 2 * beta**2 * torch.exp(-room.clamp(min=0.0) / beta)
    return beyond + room.clamp(max=0.0) * (room - 2 * beta)
