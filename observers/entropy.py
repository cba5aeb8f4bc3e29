"""EntropyObserver: the range with the least Kullback-Leibler divergence (Migacz, "8-bit inference with TensorRT", GTC
2017; extended to affine ranges as in ONNX Runtime's EntropyCalibrater).

For a threshold T, P is the histogram clipped to [-T, T], with the tails counted in its end bins; Q is the histogram
inside [-T, T], averaged over as many buckets as the integer range has steps.
"""

from __future__ import annotations

import torch
from quant.observers._histogram_store import HistogramStore, RowView
from torch import Tensor

CANDIDATES = 128
"""Thresholds tried, evenly spaced; TensorRT tries every bin, for the same answer within a hundredth of the range."""

EPSILON = 1e-4
"""Probability of a bin that is empty in Q but not in P, which would make the divergence infinite (MXNet, ORT)."""


class EntropyObserver(HistogramStore):
    """Chooses the range whose quantised distribution differs least from the one seen.

    Take it for classifiers that were calibrated by TensorRT's entropy method before. It needs thousands of values per
    range, since it compares distributions.

        T = argmin KL(P || Q),  range = [max(low, -T), min(high, T)]

    P is the histogram clipped to [-T, T], Q the same after quantisation (the module's docstring defines both). A
    symmetric scheme folds the histogram to magnitudes and has quant_max - zero_point buckets. An affine scheme has
    quant_max - quant_min over the part of [-T, T] that holds data, so one-sided data use all of them. The count of the
    zero bin is replaced by the mean of its neighbours': zero is exact at any scale, and the peak that a ReLU leaves
    there would otherwise decide alone (as in NVIDIA's pytorch-quantization).

    Source: Migacz, "8-bit inference with TensorRT", GTC 2017.

    Args:
        scheme, bins: as for HistogramObserver.
    """

    def _choose(self, row: RowView) -> tuple[float, float]:
        scheme, middle = self.scheme, self.scheme.symmetric_zero_point
        half = row.counts.numel() // 2
        if scheme.symmetric:
            counts, zero, buckets = row.magnitudes, 0, min(scheme.quant_max - middle, middle - scheme.quant_min)
        else:
            counts, zero, buckets = row.counts, half, scheme.quant_max - scheme.quant_min
        threshold = best_threshold(_without_zero_peak(counts.to(torch.float64), zero), zero, buckets) * row.width
        return -threshold, threshold


def best_threshold(counts: Tensor, zero: int, buckets: int) -> int:
    """The number of bins on either side of `zero` to keep.

    Args:
        counts: float64 (n,).
        zero: index of the bin of zero; 0 for magnitudes.
        buckets: steps of the quantised range.

    Returns:
        T in bins: the window is counts[zero - T + 1 : zero + T], cut to where there is data.
    """
    used = counts.nonzero().flatten()
    if used.numel() == 0:
        return counts.numel()
    first, last = min(int(used[0]), zero), max(int(used[-1]), zero)
    widest = max(last - zero, zero - first) + 1
    # A window with fewer bins than buckets loses nothing by quantisation, so its divergence means nothing.
    narrowest = min(buckets // 2 if first < zero < last else buckets, widest)
    step = max((widest - narrowest) // CANDIDATES, 1)
    thresholds: list[int] = [*range(widest, narrowest, -step), narrowest]
    losses = [
        divergence(
            counts[first : last + 1], max(zero - t + 1 - first, 0), min(zero + t - first, last + 1 - first), buckets
        )
        for t in thresholds
    ]
    return thresholds[int(torch.tensor(losses).argmin())]


def divergence(counts: Tensor, start: int, stop: int, buckets: int) -> float:
    """KL(P || Q) of keeping counts[start:stop] of all `counts` in `buckets` buckets; inf where nothing is inside."""
    inside = counts[start:stop]
    if not bool(inside.any()):
        return float("inf")
    p = inside.clone()
    p[0] += counts[:start].sum()
    p[-1] += counts[stop:].sum()
    bucket = torch.arange(inside.numel()) * buckets // inside.numel()
    filled = (inside > 0).to(torch.float64)
    total = torch.zeros(buckets, dtype=torch.float64).index_add_(0, bucket, inside)
    share = total / torch.zeros(buckets, dtype=torch.float64).index_add_(0, bucket, filled).clamp(min=1.0)
    q = share[bucket] * filled
    p, q = p / p.sum(), q / q.sum()
    missing = (q == 0) & (p > 0)
    q = torch.where(missing, EPSILON, q * (1.0 - EPSILON * missing.sum()))
    present = p > 0
    return float((p[present] * (p[present] / q[present]).log()).sum())


def _without_zero_peak(counts: Tensor, zero: int) -> Tensor:
    flat = counts.clone()
    flat[zero] = (counts[zero - 1] + counts[zero + 1]) / 2 if zero else counts[1]
    return flat
