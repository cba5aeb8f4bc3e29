"""Why a step of an int8 model is off: its error taken apart, and the likely cause with what to try.

Of one step, f is the float computation on the very inputs that the int8 step got, r is f rounded to the step's range,
and y is what the int8 step gave. Then

    y - f  =  (r - f) where f lies outside the range    clipping
            + (r - f) elsewhere                          rounding of the output
            + (y - r)                                    the weights, and sums rounded otherwise

so each part is measured and none is guessed. Nothing here runs a model; `compare.py` does.
"""

from __future__ import annotations

import glob
import json
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from quant.kernels import ACTIVATION_U8, QParams
from quant.observers import HistogramObserver
from quant.observers._histogram_store import RowView
from quant.recipe import QConfig

HEALTHY = 30.0
"""dB from which an error needs no cause. 8 bits leave 35 to 45 dB of what fills their range evenly."""

ONE_SIDED = 0.5
"""Share of the error's power that is its mean per channel, from which the error is a shift and no noise."""

OUTLIERS = 40.0
"""Largest value over root mean square, from which a few values take the range of all others. Of a normal distribution
the ratio reaches 6 in a million values."""

FEW_STEPS = 16
"""A channel whose largest value is fewer steps of the tensor's scale than this has less than 5 bits left."""

BARS = 64
"""Of a histogram, as the report draws it."""


@dataclass(frozen=True)
class Histogram:
    """How often values of a step's float output occur.

    Attributes:
        low, high: the extremes, and the ends of the bars, which are equally wide.
        counts: per bar.
    """

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class StepError:
    """How far one step of the int8 model is from float.

    Attributes:
        name: of the step: the user's module, or what was called.
        kind: "linear", "conv", ... or "quantize" for values that enter the integers.
        own_sqnr: in dB, of what the step itself adds: its output against float arithmetic on the same inputs.
        sqnr: in dB, of the step's output against the float model's, with all error that came down to it; inf where
            there is none.
        cosine: between the two outputs.
        clipped: share of the float values that lie outside the int8 range; 0.0 for a float output.
        cause: the likely one in words, or "" where the step is healthy.
        advice: what to try, or "".
        rule: the same as a rule of a `Recipe`, where one would do it: '"features.3": None'.
        low, high: the int8 range; None for a float output.
        histogram: of the float output's values; None where there was no finite one.
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
        """What integers stand for."""
        return (q.to(torch.float32) - self.zero_point) * self.scale

    def rounded(self, x: Tensor) -> Tensor:
        """Real values as the integers hold them."""
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
        error, others = _but_channels(error, channels_last)
        means = error.mean(others)
        self.shift += power(means) * expected.numel() / max(means.numel(), 1)
        if known is None:
            self.weights += power(error)
            return
        rounded = known.rounded(expected.to(torch.float32)).double()
        self.weights += power(output - rounded)
        outside, lost = _outside(expected, known), rounded.sub_(expected)
        self.clipping += power(lost[outside])
        self.rounding += power(lost.masked_fill_(outside, 0.0))


@dataclass
class StepSums:
    """What is kept of a step over all batches: sums and one histogram, so that memory does not grow.

    Attributes:
        module: whose rule in a recipe decides on the step; "" where there is none.
        qconfig: of the step's weight; None where it has none.
        channels_last: whether its channels are the last dimension, as a linear layer's are, and not the second.
    """

    kind: str
    module: str = ""
    qconfig: QConfig | None = None
    channels_last: bool = False
    known: Range | None = None
    own: Parts = field(default_factory=Parts)
    signal: float = 0.0
    other: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    clipped: float = 0.0
    count: int = 0
    peaks: Tensor = field(default_factory=lambda: torch.zeros(0))
    squares: Tensor = field(default_factory=lambda: torch.zeros(0))
    seen: HistogramObserver = field(default_factory=HistogramObserver)

    def add(self, of_float: Tensor, own: Tensor, output: Tensor, known: Range | None) -> None:
        """Add one output.

        Args:
            of_float: the float model's.
            own: the float computation on the inputs that the int8 step got.
            output: the int8 step's, in real values.
            known: its range; None where it is float.
        """
        a, b = of_float.detach().double(), output.detach().double()
        if not a.numel():
            return
        self.known = known
        self.own.add(own.detach().double(), b, known, channels_last=self.channels_last)
        self.signal += power(a)
        self.other += power(b)
        self.product += float((a * b).sum())
        self.noise += power(b - a)
        self.count += a.numel()
        if known is not None:
            self.clipped += float(_outside(a, known).sum())
        self.seen(of_float.detach().float())
        a, others = _but_channels(a, self.channels_last)
        peaks, squares = vector_norm(a, math.inf, others), vector_norm(a, 2, others).square()
        fits = self.peaks.shape == peaks.shape  # not where the last dimension is a length that changes
        self.peaks = torch.maximum(self.peaks, peaks) if fits else peaks
        self.squares = self.squares + squares if fits else squares

    def error(self, name: str) -> StepError:
        """The step's line."""
        size = math.sqrt(self.signal * self.other)
        cosine = self.product / size if size else float(self.signal == self.other)
        cause, advice, change = self._cause()
        return StepError(
            name,
            self.kind,
            decibels(self.own.signal, self.own.noise),
            decibels(self.signal, self.noise),
            cosine,
            self.clipped / max(self.count, 1),
            cause,
            advice,
            _rule(self.module, self.qconfig, change),
            None if self.known is None else self.known.low,
            None if self.known is None else self.known.high,
            condensed(self.seen),
        )

    def _cause(self) -> Finding:
        own = self.own
        if decibels(own.signal, own.noise) > HEALTHY:
            inherited = decibels(self.signal, self.noise) <= HEALTHY
            return Finding("error of the steps before" if inherited else "")
        largest = max(own.clipping, own.rounding, own.weights)
        if largest == own.clipping:
            cause = f"clipping: {percent(self.clipped / max(self.count, 1))} of the values lie outside the range"
            advice = "let its range take in all that was seen, or calibrate on more data, or on data like this"
            return Finding(cause, advice, {"activation_observer": "minmax"})
        if own.shift > ONE_SIDED * own.noise:
            return (
                self._of_weights("a shift of whole channels") if self.qconfig else Finding("a shift of whole channels")
            )
        if largest == own.weights and self.qconfig is not None:
            return self._of_weights("")
        return self._of_rounding()

    def _of_weights(self, cause: str) -> Finding:
        assert self.qconfig is not None
        bits = self.qconfig.weight_bits
        if bits < 8:
            default = f"rounding of the weights to {bits} bits"
            return Finding(cause or default, "give its weights 8 bits", {"weight_bits": 8})
        if not self.qconfig.per_channel:
            default = "one weight scale for all channels"
            return Finding(cause or default, "give each channel a scale", {"per_channel": True})
        return Finding(cause or "rounding of the weights", "leave it float", None)

    def _of_rounding(self) -> Finding:
        widest = int(self.peaks.argmax())
        rms = math.sqrt(float(self.squares[widest]) / max(self.count / self.peaks.numel(), 1))
        largest = float(self.peaks[widest])
        other = {"activation_observer": "auto"}
        histogram = self.qconfig is not None and self.qconfig.activation_observer in ("auto", "histogram")
        advice = "leave it float" if histogram else "choose its range by the histogram, or leave it float"
        change = None if histogram else other
        if largest > OUTLIERS * rms:
            cause = f"outliers: the largest value is {largest / rms:.0f} times the root mean square of its channel"
            return Finding(cause, advice, change)
        usual = float(self.peaks[self.peaks > 0].quantile(0.25)) if largest else 0.0
        if self.peaks.numel() > 1 and self.known is not None and usual < FEW_STEPS * self.known.scale:
            cause = f"range spread: channels differ by {largest / usual:.0f} times and share one scale"
            return Finding(cause, "leave it float, or scale its channels alike in the float model", None)
        return Finding("a range much wider than most of its values", advice, change)


class Finding(NamedTuple):
    """A cause, what to try, and the settings to change for that: None leaves the layer float, {} is no change."""

    cause: str
    advice: str = ""
    change: dict[str, Any] | None = {}  # noqa: RUF012 - never written to


def _rule(module: str, qconfig: QConfig | None, change: dict[str, Any] | None) -> str:
    """The rule of a `Recipe` that makes the change; "" for steps that no rule names."""
    if qconfig is None or change == {}:
        return ""
    pattern = json.dumps(glob.escape(module), ensure_ascii=False)
    if change is None:
        return f"{pattern}: None"
    if "activation_observer" in change:
        change = {**change, "activation_options": {}}  # of the observer that was
    return f"{pattern}: quant.{replace(qconfig, **change)}"


def percent(share: float) -> str:
    """A share for people, two digits of it."""
    text = f"{100 * share:.2g}" if share < 0.995 else f"{100 * share:.0f}"
    return f"{text} %" if "e" not in text else f"{100 * share:.5f} %"


def power(x: Tensor) -> float:
    """Sum of squares."""
    return float(vector_norm(x)) ** 2  # without x.square(), a copy that takes ten times as long


def decibels(signal: float, noise: float) -> float:
    """10 log10 of a ratio of powers; inf where there is no noise, and -inf where there is nothing else."""
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


def _outside(x: Tensor, known: Range) -> Tensor:
    """Whether values lie further outside than rounding brings back."""
    half = known.scale / 2
    return (x < known.low - half) | (x > known.high + half)


def _but_channels(x: Tensor, channels_last: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Values, and all their dimensions but that of the channels, the last or the second.

    A single row of values is a channel each.
    """
    if x.dim() < 2:
        return x.reshape(1, -1), (0,)
    channels = x.dim() - 1 if channels_last else 1
    return x, tuple(dim for dim in range(x.dim()) if dim != channels)
