"""The range with the least squared error over a histogram of everything seen, and of what is to come: the default for
activations.

The criterion of Sung et al. 2015 (arXiv 1511.06488) and Banner et al. 2019 (arXiv 1810.05723): clip as long as the
clipped tail costs less than the finer steps gain. Their closed forms assume a Gaussian or Laplacian; here the error is
summed over the histogram itself, and only what lies beyond it is a model (`_unseen.py`).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from quant.observers._histogram_store import HistogramStore, RowView
from quant.observers._range_search import best_range, squared_error
from quant.observers._unseen import Unseen
from torch import Tensor


class HistogramObserver(HistogramStore):
    """argmin over ranges of sum_x (dequantize(quantize(x)) - x)**2, and of an activation's range plus the error of the
    one value beyond either end that as much new data is expected to bring.

    Bound: the distance of x to the nearest level changes by no more than x does, and the value that stands for a bin is
    within one bin width w of all values in it. So the root mean square error of the chosen range is within 2 w of
    the best candidate's, w <= 4 / bins of the largest magnitude.

    Attributes:
        expects_more: whether what is seen is a sample. A weight is all that there is.
    """

    expects_more: ClassVar[bool] = True

    def _choose(self, row: RowView) -> tuple[float, float]:
        used = row.counts > 0
        values, weights = row.centers[used], row.counts[used].to(torch.float64)
        of_seen, unseen = squared_error(values, weights, self.scheme), self._unseen(row)

        def error(low: Tensor, high: Tensor) -> Tensor:
            return of_seen(low, high) + unseen.error(low, high)

        return best_range(error, *unseen.limits(), self.scheme.symmetric)

    def _limits(self, row: RowView) -> tuple[float, float]:
        return self._unseen(row).limits()

    def _unseen(self, row: RowView) -> Unseen:
        # Activations are unsigned integers here and weights signed ones, whichever observer a recipe gives them.
        expected = self.expects_more and self.scheme.dtype == torch.uint8
        return Unseen.beyond(row) if expected else Unseen(row.low, row.high)
