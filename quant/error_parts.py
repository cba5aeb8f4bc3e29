"""The error of an int8 step, taken apart into clipping, rounding of the output, and weights.

Let f be the float computation on the inputs that the int8 step got, r be f rounded to the step's range, and y the int8
step's output. Then

    y - f  =  (r - f) where f lies outside the range    clipping
            + (r - f) elsewhere                          rounding of the output
            + (y - r)                                    the weights, and sums that are rounded otherwise

so that each part is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from quant.kernels import ACTIVATION_U8, QParams
from quant.observers import HistogramObserver
from quant.observers._histogram_store import RowView

BARS = 64
"""The number of bars of a histogram in the report."""


@dataclass(frozen=True)
class Histogram:
    """The distribution of a step's float output.

    Attributes:
        low, high: the extremes, and the ends of the bars, which are equally wide.
        counts: per bar.
    """

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class StepError:
    """The error of one step of the int8 model against float.

    Attributes:
        name: of the step: the user's module, or what was called.
        kind: "linear", "conv", ... or "quantize" for values that enter the integers.
        own_sqnr: in dB, of the step's own error: its output against float arithmetic on the same inputs.
        sqnr: in dB, of the step's output against the float model's, with the errors of earlier steps; inf where there
            is none.
        cosine: between the two outputs.
        clipped: share of the float values that lie outside the int8 range; 0.0 for a float output.
        cause: the likely cause in words, or "" where the error is usual.
        advice: what to try, or "".
        rule: the advice as a rule of a `Recipe`, where there is one: '"features.3": None'.
        low, high: the int8 range; None for a float output.
        histogram: of the float output; None where it has no finite value.
    """

    name: str
    kind: str
    own_sqnr: float
    sqnr: float
    cosine: float
    clipped: float
    cause: str
    advice: str
    rule: str = ""
    low: float | None = None
    high: float | None = None
    histogram: Histogram | None = None


@dataclass(frozen=True)
class Range:
    """Scale and zero point of a uint8 value."""

    scale: float
    zero_point: int

    @property
    def low(self) -> float:
        """The real value of 0."""
        return -self.zero_point * self.scale

    @property
    def high(self) -> float:
        """The real value of 255."""
        return (255 - self.zero_point) * self.scale

    def real(self, q: Tensor) -> Tensor:
        """The real values of integers."""
        return (q.to(torch.float32) - self.zero_point) * self.scale

    def rounded(self, x: Tensor) -> Tensor:
        """Real values, rounded to the integers and dequantised."""
        scale, zero = torch.tensor(self.scale), torch.tensor(self.zero_point, dtype=torch.int32)
        qparams = QParams(scale, zero, ACTIVATION_U8)
        return qparams.dequantize(qparams.quantize(x))


@dataclass
class Parts:
    """Sums over all values of a step's own error, in the terms of this file's equation."""

    signal: float = 0.0
    noise: float = 0.0
    shift: float = 0.0
    clipping: float = 0.0
    rounding: float = 0.0
    weights: float = 0.0

    def add(self, expected: Tensor, output: Tensor, known: Range | None, *, channels_last: bool) -> None:
        """Add one output, float64: f and y."""
        error = output - expected
        self.signal += power(expected)
        self.noise += power(error)
        error, others = other_dimensions(error, channels_last)
        means = error.mean(others)
        self.shift += power(means) * expected.numel() / max(means.numel(), 1)
        if known is None:
            self.weights += power(error)
            return
        rounded = known.rounded(expected.to(torch.float32)).double()
        self.weights += power(output - rounded)
        outside, lost = is_outside(expected, known), rounded.sub_(expected)
        self.clipping += power(lost[outside])
        self.rounding += power(lost.masked_fill_(outside, 0.0))


def percent(share: float) -> str:
    """A share in per cent, with two digits."""
    text = f"{100 * share:.2g}" if share < 0.995 else f"{100 * share:.0f}"
    return f"{text} %" if "e" not in text else f"{100 * share:.5f} %"


def power(x: Tensor) -> float:
    """Sum of squares."""
    return float(vector_norm(x)) ** 2  # without x.square(), a copy that takes ten times as long


def decibels(signal: float, noise: float) -> float:
    """10 log10 of a ratio of powers; inf without noise, and -inf without signal."""
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def condensed(seen: HistogramObserver) -> Histogram | None:
    """An observer's counts in BARS bars between the extremes."""
    exponent = seen.exponents()[0]
    if exponent is None:
        return None
    row = RowView(seen.counts[0], 2.0**exponent, float(seen.low[0]), float(seen.high[0]))
    used = row.counts > 0
    width = (row.high - row.low) / BARS
    place = ((row.centers[used] - row.low) / (width or 1.0)).long().clamp(0, BARS - 1)
    counts = torch.zeros(BARS, dtype=torch.int64).index_add_(0, place, row.counts[used])
    return Histogram(row.low, row.high, tuple(counts.tolist()))


def is_outside(x: Tensor, known: Range) -> Tensor:
    """Whether values lie so far outside of the range that rounding clips them."""
    half = known.scale / 2
    return (x < known.low - half) | (x > known.high + half)


def other_dimensions(x: Tensor, channels_last: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Values, and all their dimensions except that of the channels, which is the last or the second.

    A single row of values is a channel each.
    """
    if x.dim() < 2:
        return x.reshape(1, -1), (0,)
    channels = x.dim() - 1 if channels_last else 1
    return x, tuple(dim for dim in range(x.dim()) if dim != channels)
