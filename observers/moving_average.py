"""MovingAverageObserver: a moving average of each batch's extremes (Jacob et al. 2018, arXiv 1712.05877)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from quant.kernels import ACTIVATION_U8, QScheme
from quant.observers._rounding import compiled
from quant.observers.base import FiniteRange, Observer, RangeObserver, as_plain
from torch import Tensor


class MovingAverageObserver(RangeObserver):
    """Keeps an exponential moving average of each batch's smallest and largest value: the default for activations in
    training.

    The range follows activations that drift, and an outlier fades. The result depends on the order of the batches.
    `momentum=1.0` is the range of the latest tensor alone, as for a weight in training: a running extreme would
    remember weights that no longer exist.

        low += momentum * (min(batch) - low)
        high += momentum * (max(batch) - high)        the first batch sets both

    Source: Jacob et al. 2018 (arXiv 1712.05877), section 3.1.

    Merging averages the two ranges with the numbers of batches as weights: equal shards of independent batches weigh
    the same. It is not what one pass would give (no order of the batches is known); for that, in training over several
    processes, use `distributed=True`.

    Buffers, besides Observer's:
        batches: int64 scalar, how many tensors with finite values were seen.

    Args:
        scheme, distributed: as for RangeObserver.
        momentum: weight of the newest batch, in (0, 1].
    """

    follows_batches: ClassVar[bool] = True
    batches: Tensor

    def __init__(self, scheme: QScheme = ACTIVATION_U8, *, momentum: float = 0.01, distributed: bool = False) -> None:
        super().__init__(scheme, distributed=distributed)
        if not 0.0 < momentum <= 1.0:
            raise ValueError(f"MovingAverageObserver: momentum is {momentum}, expected a number in (0, 1]")
        self.momentum = momentum
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def reset(self) -> None:
        super().reset()
        self.batches.zero_()

    def start(self, low: Tensor, high: Tensor) -> None:
        super().start(low, high)
        self.batches.fill_(1)

    def _update(self, rows: Tensor, seen: FiniteRange) -> None:
        if seen.all_finite and not torch.compiler.is_compiling() and self.low.max().item() < math.inf:
            # Every row has data now and before: the same values, by a third of the operations.
            self.low.copy_(mix(self.low, seen.low, self.momentum))
            self.high.copy_(mix(self.high, seen.high, self.momentum))
            self.batches += 1
            return
        has_data = seen.low <= seen.high
        self._follow(self.low, seen.low, has_data)
        self._follow(self.high, seen.high, has_data)
        self.batches += has_data.any()

    def follow(self, x: Tensor, clamp: tuple[float, float], scale: Tensor, zero_point: Tensor) -> bool:
        """Observe clamp(x), float32, and store the scale and zero point of the range: one operator in place of thirty.

        Returns:
            Whether it did; else there is no such operator for this observer or tensor.
        """
        if self.distributed or self.given is not None or self.scheme.axis is not None or not compiled(x):
            return False
        scheme = self.scheme
        torch.ops.octet.follow_range(
            as_plain(x.detach()), self.momentum, *clamp, scheme.quant_min, scheme.quant_max,
            scheme.symmetric_zero_point if scheme.symmetric else None, self.low, self.high, self.batches,
            self.nan_count, self.inf_count, scale, zero_point,
        )  # fmt: skip
        return True

    def _follow(self, average: Tensor, newest: Tensor, has_data: Tensor) -> None:
        moved = torch.where(torch.isinf(average), newest, mix(average, newest, self.momentum))
        average.copy_(torch.where(has_data, moved, average))

    def _merge(self, other: Observer) -> None:
        assert isinstance(other, MovingAverageObserver)
        theirs = other.batches.to(self.batches.device)
        share = (theirs / (self.batches + theirs).clamp(min=1)).to(torch.float32)
        self._average_with(self.low, other.low, math.inf, share)
        self._average_with(self.high, other.high, -math.inf, share)
        self.batches += theirs

    def _average_with(self, mine: Tensor, theirs: Tensor, nothing: float, share: Tensor) -> None:
        theirs = theirs.to(mine.device)
        mean = torch.where(mine == nothing, theirs, mix(mine, theirs, share))
        mine.copy_(torch.where(theirs == nothing, mine, mean))

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "momentum": self.momentum}


def mix(a: Tensor, b: Tensor, share: float | Tensor) -> Tensor:
    """(1 - share) * a + share * b: exactly b at share 1, and no overflow, where a + share * (b - a) has both faults."""
    return a * (1.0 - share) + b * share
