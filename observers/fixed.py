"""A range known beforehand: what a function can return for any input (TensorFlow Lite's 8-bit specification).

Sigmoid and softmax give [0, 1], tanh [-1, 1]. TensorFlow Lite and QNNPACK use the scales 1/256 and 1/128 there, which
leave out the largest value by one step: FixedObserver(low=0, high=255 / 256) and FixedObserver(low=-1, high=127 / 128)
are exactly those.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from quant.kernels import ACTIVATION_U8, QScheme
from quant.observers.base import FiniteRange, Observer
from torch import Tensor


class FixedObserver(Observer):
    """Uses the range [low, high] given as options; statistics are kept for the report and change nothing.

    Take it where a function's bounds are known, such as a sigmoid's, or where a device prescribes the scale. It has a
    range before any data is seen, except with `scheme.axis`, where the number of channels is unknown. The ends have no
    default: a range that nobody chose would clip in silence.

    Args:
        scheme: as for Observer.
        low, high: finite, low <= high.
    """

    by_hand: ClassVar[bool] = True

    def __init__(self, scheme: QScheme = ACTIVATION_U8, *, low: float, high: float) -> None:
        super().__init__(scheme)
        self.give(low, high)
        self.fixed = (low, high)

    @classmethod
    def sigmoid(cls, scheme: QScheme = ACTIVATION_U8) -> FixedObserver:
        """[0, 1]."""
        return cls(scheme, low=0.0, high=1.0)

    @classmethod
    def tanh(cls, scheme: QScheme = ACTIVATION_U8) -> FixedObserver:
        """[-1, 1]."""
        return cls(scheme, low=-1.0, high=1.0)

    @classmethod
    def softmax(cls, scheme: QScheme = ACTIVATION_U8) -> FixedObserver:
        """[0, 1]."""
        return cls(scheme, low=0.0, high=1.0)

    def _update(self, rows: Tensor, seen: FiniteRange) -> None:
        self.low.copy_(torch.minimum(self.low, seen.low))
        self.high.copy_(torch.maximum(self.high, seen.high))

    def _merge(self, other: Observer) -> None:
        self.low.copy_(torch.minimum(self.low, other.low.to(self.low.device)))
        self.high.copy_(torch.maximum(self.high, other.high.to(self.high.device)))

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "low": self.fixed[0], "high": self.fixed[1]}
