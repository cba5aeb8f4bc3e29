"""The smallest and largest value ever seen (Jacob et al. 2018, arXiv 1712.05877, section 3).

Exact, order-independent; merging shards equals one pass bit for bit. One outlier sets the range for good.
"""

from __future__ import annotations

import torch
from quant.observers.base import FiniteRange, Observer, RangeObserver
from torch import Tensor


class MinMaxObserver(RangeObserver):
    """low = min of all values, high = max of all values."""

    def _update(self, rows: Tensor, seen: FiniteRange) -> None:
        self.low.copy_(torch.minimum(self.low, seen.low))
        self.high.copy_(torch.maximum(self.high, seen.high))

    def _merge(self, other: Observer) -> None:
        self.low.copy_(torch.minimum(self.low, other.low.to(self.low.device)))
        self.high.copy_(torch.maximum(self.high, other.high.to(self.high.device)))
