"""ChannelMean: the mean of each channel over all values seen, for bias correction."""

from __future__ import annotations

import math

import torch
from quant.kernels import ACTIVATION_U8
from quant.observers._state import fresh
from quant.observers.base import FiniteRange, Observer, to_rows
from torch import Tensor


class ChannelMean(Observer):
    """Keeps the mean of a layer's input per channel, from which `convert` corrects the bias.

        mean = E[x]        per channel

    It chooses no range: `low` and `high` are the smallest and largest sum of a channel in one tensor, which only show
    that data was seen. NaN and inf count as 0; the observer of the same value's range counts and reports them.

    Buffers:
        total: float64, (channels,). Sums of each tensor are rounded to float32 before they are added, so that adding
            is exact where they differ by less than 2**29: then merged shards equal one pass to the bit.
        count: int64 (), values per channel.

    Args:
        axis: of the channels, from the end: -1 for a linear layer, -3 for a two-dimensional convolution.
    """

    total: Tensor
    count: Tensor

    def __init__(self, axis: int) -> None:
        super().__init__(ACTIVATION_U8)
        self.axis = axis
        self.register_buffer("total", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def mean(self) -> Tensor | None:
        """float32 (channels,); None where nothing was seen."""
        if not int(self.count):
            return None
        return (self.total / self.count).to(torch.float32)

    def reset(self) -> None:
        super().reset()
        self.total.zero_()
        self.count.zero_()

    @property
    def _rows_may_change(self) -> bool:
        return True

    def _observe(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        others = [dim for dim in range(x.dim()) if dim != x.dim() + self.axis]
        sums = x.sum(others, dtype=torch.float32) if others else x.to(torch.float32)
        low, high = torch.aminmax(sums)
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            sums = to_rows(x, self.axis).nan_to_num(0.0, 0.0, 0.0).sum(1)
            low, high = torch.aminmax(sums)
        self._take(sums, x.numel() // sums.numel())
        self._update(sums, FiniteRange(low, high, 0, 0, True))

    def _take(self, sums: Tensor, count: Tensor | int) -> None:
        if not self.total.numel():
            self.total = fresh(self.total, (sums.numel(),), 0.0, sums.device)
        if self.total.shape != sums.shape:
            raise ValueError(f"{self._where()}: {sums.numel()} channels, expected {self.total.numel()} as before")
        self.total.add_(sums)
        self.count.add_(count)

    def _update(self, rows: Tensor, seen: FiniteRange) -> None:
        torch.minimum(self.low, seen.low, out=self.low)
        torch.maximum(self.high, seen.high, out=self.high)

    def _merge(self, other: Observer) -> None:
        assert isinstance(other, ChannelMean)
        self.low.copy_(torch.minimum(self.low, other.low.to(self.low.device)))
        self.high.copy_(torch.maximum(self.high, other.high.to(self.high.device)))
        if int(other.count):
            self._take(other.total.to(self.low.device), other.count.to(self.count.device))

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "axis": self.axis}
