"""A range that leaves a fixed share of the values outside (Wu et al. 2020, arXiv 2004.09602, section 5.2).

Cuts as ONNX Runtime's PercentileCalibrater does: half of the share at either end, or all of it in the magnitude where
the scheme is symmetric.
"""

from __future__ import annotations

import math

import torch
from quant.kernels import ACTIVATION_U8, QScheme
from quant.observers._histogram_store import BINS, HistogramStore, RowView
from torch import Tensor


class PercentileObserver(HistogramStore):
    """[quantile((100 - p) / 200), quantile((100 + p) / 200)], or +-quantile(p / 100) of |x|, at the bins' outer edges.

    Bound: each end lies outside the exact order statistic by at most the size of its bin, w, and 2 w for the bin
    of zero; never inside it.

    Args:
        scheme, bins: as for HistogramStore.
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
