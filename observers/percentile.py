"""PercentileObserver: a range that clips a fixed share of the values (Wu et al. 2020, arXiv 2004.09602)."""

from __future__ import annotations

import math

import torch
from quant.kernels import ACTIVATION_U8, QScheme
from quant.observers._histogram_store import BINS, HistogramStore, RowView
from torch import Tensor


class PercentileObserver(HistogramStore):
    """Clips a fixed share of the values seen and keeps the rest.

    Take it where rare outliers carry no information and their share is known. It looks at how many values are clipped,
    not at how far they lie outside; HistogramObserver weighs the distance too.

        affine:     low, high = quantile((100 - p) / 200), quantile((100 + p) / 200)
        symmetric:  high = -low = quantile(p / 100) of |x|

    Each end is the outer edge of the quantile's bin: never inside the exact order statistic, and outside it by at most
    the bin width w, or 2 w for the bin of zero.

    Source: Wu et al. 2020 (arXiv 2004.09602), section 5.2; the share is split between the ends as in ONNX Runtime's
    PercentileCalibrater.

    Args:
        scheme, bins: as for HistogramObserver.
        percentile: p, the share kept inside in percent, in (50, 100]. 100 is min-max.
    """

    def __init__(self, scheme: QScheme = ACTIVATION_U8, *, percentile: float = 99.99, bins: int = BINS) -> None:
        super().__init__(scheme, bins=bins)
        if not 50.0 < percentile <= 100.0:
            raise ValueError(f"PercentileObserver: percentile is {percentile}, expected a number in (50, 100]")
        self.percentile = percentile

    def _choose(self, row: RowView) -> tuple[float, float]:
        if self.scheme.symmetric:
            bound = (_rank_bin(row.magnitudes, self.percentile / 100.0) + 1) * row.width
            return -bound, bound
        share = 0.5 + self.percentile / 200.0
        high = row.upper_edges[_rank_bin(row.counts, share)].item()
        low = row.lower_edges.flip(0)[_rank_bin(row.counts.flip(0), share)].item()
        return low, high

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "percentile": self.percentile}


def _rank_bin(counts: Tensor, share: float) -> int:
    """The first bin up to which at least `share` of all values lie; an integer rank, so no float sum decides."""
    rank = max(math.ceil(share * int(counts.sum())), 1)
    return int(torch.searchsorted(counts.cumsum(0), rank))
