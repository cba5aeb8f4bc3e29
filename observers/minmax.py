"""MinMaxObserver: the smallest and largest value ever seen (Jacob et al. 2018, arXiv 1712.05877, section 3)."""

from __future__ import annotations

import torch
from quant.observers.base import FiniteRange, Observer, RangeObserver
from torch import Tensor


def _channel_extremes(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """float32 (channels,) each; NaN where a channel holds one.

    As the values lie: rows of `to_rows` would be a copy of an image, and cost 100 times as much.
    """
    if axis < x.dim() - 1 and x.is_contiguous():
        rows = x.flatten(axis + 1)
        low, high = rows.amin(-1), rows.amax(-1)
    else:
        low = high = x
    others = [dim for dim in range(low.dim()) if dim != axis]
    if others:
        low, high = low.amin(others), high.amax(others)
    return low.to(torch.float32), high.to(torch.float32)


class MinMaxObserver(RangeObserver):
    """Keeps the smallest and largest value seen, so that no calibration value clips.

    Take it for values that must never clip, such as logits of a policy or coordinates, and for weights at 8 bits. One
    outlier widens the range for good and makes every step coarser.

        low = min x,  high = max x        over all finite values

    Exact, and independent of order and batching; merged shards equal one pass bit for bit.

    Source: Jacob et al. 2018 (arXiv 1712.05877), section 3.

    Args:
        scheme, distributed: as for RangeObserver.
    """

    def _observe(self, x: Tensor) -> None:
        axis = self.scheme.axis
        if axis is None or x.numel() == 0 or self.distributed or torch.compiler.is_compiling():
            super()._observe(x)
            return
        low, high = _channel_extremes(x, axis % x.dim())
        if not bool(torch.isfinite(torch.stack((low, high))).all()):
            super()._observe(x)  # which counts what is not finite, and leaves it out
            return
        self._allocate(low.numel(), x.device)
        self._update(x, FiniteRange(low, high, 0, 0, True))

    def _update(self, rows: Tensor, seen: FiniteRange) -> None:
        self.low.copy_(torch.minimum(self.low, seen.low))
        self.high.copy_(torch.maximum(self.high, seen.high))

    def _merge(self, other: Observer) -> None:
        self.low.copy_(torch.minimum(self.low, other.low.to(self.low.device)))
        self.high.copy_(torch.maximum(self.high, other.high.to(self.high.device)))
