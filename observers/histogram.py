"""The range with the least squared error over a histogram of everything seen: the default for activations.

The criterion of Sung et al. 2015 (arXiv 1511.06488) and Banner et al. 2019 (arXiv 1810.05723): clip as long as the
clipped tail costs less than the finer steps gain. Their closed forms assume a Gaussian or Laplacian; here the error is
summed over the histogram itself.
"""

from __future__ import annotations

import torch
from quant.observers._histogram_store import HistogramStore, RowView
from quant.observers._range_search import best_range, squared_error


class HistogramObserver(HistogramStore):
    """argmin over ranges of sum_x (dequantize(quantize(x)) - x)**2.

    Bound: the distance of x to the nearest level changes by no more than x does, and the value that stands for a bin is
    within one bin width w of all values in it. So the root mean square error of the chosen range is within 2 w of
    the best candidate's, w <= 4 / bins of the largest magnitude.
    """

    def _choose(self, row: RowView) -> tuple[float, float]:
        used = row.counts > 0
        values, weights = row.centers[used], row.counts[used].to(torch.float64)
        return best_range(squared_error(values, weights, self.scheme), row.low, row.high, self.scheme.symmetric)
