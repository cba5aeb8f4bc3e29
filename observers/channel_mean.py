"""ChannelMean: the mean of each channel over all values seen, for bias correction."""

from __future__ import annotations

import torch
from quant.kernels import ACTIVATION_U8, channel_sums
from quant.kernels.reference_activation import add_sums
from quant.observers._state import buffers_of, fresh
from quant.observers.base import Observer
from torch import Tensor


class ChannelMean(Observer):
    """Keeps the mean of a layer's input per channel, from which `convert` corrects the bias.

        mean = E[x]        per channel

    It chooses no range: `low` and `high` are the smallest and largest sum of a channel in one tensor, which only show
    that data was seen. NaN and inf count as 0; the observer of the same value's range counts and reports them.

    Buffers:
        total: float64, (channels,). Sums of each tensor, formed in double, are rounded to float32 before they are
            added, so that adding is exact where they differ by less than 2**29: then merged shards equal one pass to
            the bit.
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

    def state_for(self, channels: int, device: torch.device) -> list[Tensor]:
        """The buffers that the sums of a tensor's channels are added to: total, count, low, high.

        Raises:
            ValueError: there were tensors with another number of channels.
        """
        if not self.total.numel():
            self.total = fresh(self.total, (channels,), 0.0, device)
        state = buffers_of(self, "total", "count", "low", "high")
        if state[0].numel() != channels:
            raise ValueError(f"{self._where()}: {channels} channels, expected {state[0].numel()} as before")
        return state

    def _observe(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        state = self.state_for(x.shape[self.axis], x.device)
        add_sums(channel_sums(x.to(torch.float32), self.axis), x.numel() // x.shape[self.axis], state)

    def _merge(self, other: Observer) -> None:
        assert isinstance(other, ChannelMean)
        self.low.copy_(torch.minimum(self.low, other.low.to(self.low.device)))
        self.high.copy_(torch.maximum(self.high, other.high.to(self.high.device)))
        if int(other.count):
            total, count, *_ = self.state_for(other.total.numel(), self.low.device)
            total += other.total.to(total.device)
            count += other.count.to(count.device)

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "axis": self.axis}


class ChannelSquare(ChannelMean):
    """Keeps the mean square of a layer's input per channel, by which `convert` chooses scales of few bits.

        mean = E[x**2]        per channel

    Otherwise as ChannelMean.
    """

    def _observe(self, x: Tensor) -> None:
        super()._observe(x.to(torch.float32).square())
