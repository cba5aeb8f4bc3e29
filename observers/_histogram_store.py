"""The histogram that the L2, percentile and entropy observers search: streaming, of constant size, mergeable.

A row's bins have the width w = 2**e and are anchored at zero. A value x falls into bin

    s = trunc(x / w),        |s| < bins / 2,

so bin s > 0 holds [s w, (s + 1) w), bin s < 0 mirrors it, and bin 0 holds (-w, w). e is the smallest exponent for which
the largest magnitude seen so far fits, so it depends on that magnitude alone. Dividing by a power of two and
truncating are exact, and trunc(trunc(x / w) / 2) = trunc(x / 2w), so widening moves whole bins without an error.
Therefore the state depends only on the multiset of values seen: in any order, any batches, any shards merged, it is
the same bit for bit. At least bins / 4 bins lie between zero and the largest magnitude.

The operator `observe_histogram` finds the extremes and counts in the same pass, on the grid known so far; only a value
that does not fit that grid costs a second pass.

What is lost is where within its bin a value lies: less than w, which is at most 4 / bins of the largest magnitude.
"""

from __future__ import annotations

import torch
from quant.kernels import ACTIVATION_U8, QScheme, observe_histogram
from quant.kernels.reference_histogram import exponent_for, widen
from quant.observers._compiler import not_compiled
from quant.observers._state import fresh
from quant.observers.base import Observer
from torch import Tensor

BINS = 4096
"""At least 1024 between zero and the largest magnitude, four or more in every step of 8 bits; 32 KiB of counts."""


class HistogramStore(Observer):
    """Counts of every value seen, on a power-of-two grid; subclasses turn them into a range.

    Merging shards equals one pass bit for bit, in any order.

    Buffers, besides Observer's exact low and high:
        counts: int64 (rows, bins); bin s is at index s + bins / 2.

    Args:
        scheme: as for Observer.
        bins: a power of two from 64 to 32768.
    """

    counts: Tensor

    def __init__(self, scheme: QScheme = ACTIVATION_U8, *, bins: int = BINS) -> None:
        super().__init__(scheme)
        if not 64 <= bins <= 32768 or bins & (bins - 1):
            raise ValueError(f"{type(self).__name__}: bins is {bins}, expected a power of two from 64 to 32768")
        self.bins = bins
        self.register_buffer("counts", torch.zeros(self.low.numel(), bins, dtype=torch.int64))

    def reset(self) -> None:
        super().reset()
        self.counts.zero_()

    def exponents(self) -> list[int | None]:
        """log2 of each row's bin width; None where nothing was seen."""
        return grid_exponents(self.low, self.high, self.bins)

    # The grid is Python numbers read from the buffers: torch.compile steps around these two instead of tracing them.
    @not_compiled
    def _observe(self, x: Tensor) -> None:
        super()._observe(x)

    @not_compiled
    def range(self) -> tuple[Tensor, Tensor]:
        return super().range()

    def _add(self, rows: Tensor) -> None:
        observe_histogram(rows, self.low, self.high, self.nan_count, self.inf_count, self.counts)

    def _grow(self, low: Tensor, high: Tensor) -> list[int | None]:
        """Include [low, high] in the extremes and widen each row's bins until it fits; returns the new exponents()."""
        exponents = self.exponents()
        for row, needed in enumerate(grid_exponents(low, high, self.bins)):
            have = exponents[row]
            if needed is None or (have is not None and needed <= have):
                continue
            exponents[row] = needed
            if have is not None:
                self.counts[row] = widen(self.counts[row], needed - have)
        self.low.copy_(torch.minimum(self.low, low))
        self.high.copy_(torch.maximum(self.high, high))
        return exponents

    def _merge(self, other: Observer) -> None:
        assert isinstance(other, HistogramStore)
        exponents = self._grow(other.low.to(self.low.device), other.high.to(self.high.device))
        for mine, theirs, new, old in zip(self.counts, other.counts, exponents, other.exponents(), strict=True):
            if old is not None and new is not None:
                mine += widen(theirs, new - old).to(mine.device)

    def _allocate(self, rows: int, device: torch.device) -> None:
        super()._allocate(rows, device)
        if self.counts.shape[0] != rows:
            self.counts = fresh(self.counts, (rows, self.bins), 0, device)

    def _range(self) -> tuple[Tensor, Tensor]:
        ranges = [self._row_range(index, exponent) for index, exponent in enumerate(self.exponents())]
        return self.low.new_tensor([low for low, _ in ranges]), self.high.new_tensor([high for _, high in ranges])

    def _row_range(self, index: int, exponent: int | None) -> tuple[float, float]:
        assert exponent is not None, "range() has checked that every row has data"
        view = RowView(self.counts[index].cpu(), 2.0**exponent, self.low[index].item(), self.high[index].item())
        low, high = self._choose(view)
        low, high = max(low, view.low), min(high, view.high)
        if low <= high:
            return low, high
        # All values on one side of zero and all clipped, as can be best when steps are wider than their spread.
        return (high, high) if high > 0 else (low, low)

    def _choose(self, row: RowView) -> tuple[float, float]:
        """The range (low, high) that this observer chooses for one row."""
        raise NotImplementedError

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "bins": self.bins}


class RowView:
    """One row of the store, with its bins as real numbers in float64 on the CPU.

    Attributes:
        counts: int64 (bins,), bin s at index s + bins / 2.
        width: w, a power of two.
        low, high: the exact extremes of the row.
    """

    def __init__(self, counts: Tensor, width: float, low: float, high: float) -> None:
        self.counts, self.width, self.low, self.high = counts, width, low, high

    @property
    def magnitudes(self) -> Tensor:
        """Counts of |x|: int64 (bins / 2,), entry m holds bins m and -m."""
        half = self.counts.numel() // 2
        folded = self.counts[half:].clone()
        folded[1:] += self.counts[1:half].flip(0)
        return folded

    @property
    def signed(self) -> Tensor:
        """s of every bin, float64 (bins,)."""
        half = self.counts.numel() // 2
        return torch.arange(-half, half, dtype=torch.float64)

    @property
    def lower_edges(self) -> Tensor:
        """Smallest value of each bin, or the limit that it approaches; within [low, high]."""
        s = self.signed
        return (torch.where(s > 0, s, s - 1) * self.width).clamp(self.low, self.high)

    @property
    def upper_edges(self) -> Tensor:
        """Largest value of each bin, or the limit that it approaches; within [low, high]."""
        s = self.signed
        return (torch.where(s >= 0, s + 1, s) * self.width).clamp(self.low, self.high)

    @property
    def centers(self) -> Tensor:
        """The centre of each bin, which represents its values; zero for bin 0; within [low, high]."""
        s = self.signed
        return ((s + 0.5 * torch.sign(s)) * self.width).clamp(self.low, self.high)


def grid_exponents(low: Tensor, high: Tensor, bins: int) -> list[int | None]:
    """log2 of the bin width that each range (rows,) needs; None where low > high, the sign of no data."""
    return [exponent_for(a, b, bins) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
