"""HistogramObserver: the range with the least squared error, the default for activations after training.

The criterion of Sung et al. 2015 (arXiv 1511.06488) and Banner et al. 2019 (arXiv 1810.05723): clip as long as the
clipped tail costs less than the finer steps gain. Their closed forms assume a Gaussian or Laplacian; here the error is
summed over the histogram itself.
"""

from __future__ import annotations

import torch
from quant.observers._histogram_store import HistogramStore, RowView
from quant.observers._range_search import best_range, squared_error


class HistogramObserver(HistogramStore):
    """Chooses the range with the least squared rounding and clipping error over all values seen.

    The default for activations after training: it clips outliers where finer steps for the other values gain more than
    the clipping costs. Take MinMaxObserver where nothing may clip.

        range = argmin over (low, high) of  sum_x (dequantize(quantize(x)) - x)**2

    The sum runs over a histogram, so the choice is approximate. The distance of x to the nearest level changes by no
    more than x does, and a bin's centre is within one bin width w of every value in it. So the root mean square error
    of the chosen range is within 2 w of the best candidate's, with w <= 4 / bins of the largest magnitude.

    Source: Sung et al. 2015 (arXiv 1511.06488); Banner et al. 2019 (arXiv 1810.05723).

    Args:
        scheme: as for Observer.
        bins: a power of two from 64 to 32768, 4096 by default.
    """

    def _choose(self, row: RowView) -> tuple[float, float]:
        used = row.counts > 0
        values, weights = row.centers[used], row.counts[used].to(torch.float64)
        return best_range(squared_error(values, weights, self.scheme), row.low, row.high, self.scheme.symmetric)
