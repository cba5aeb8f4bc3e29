"""The likely cause of an int8 step's error, from its measured parts (`error_parts.py`), with advice.

Nothing here runs a model; `compare.py` does.
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

from quant.error_parts import (
    Parts,
    Range,
    StepError,
    condensed,
    decibels,
    is_outside,
    other_dimensions,
    percent,
    power,
)
from quant.observers import HistogramObserver
from quant.recipe import QConfig

HEALTHY = 30.0
"""The SQNR in dB from which no cause is named. 8 bits give 35 to 45 dB for values that fill the range evenly."""

ONE_SIDED = 0.5
"""The share of the error's power in its mean per channel from which the error counts as a shift."""

OUTLIERS = 40.0
"""The ratio of largest value to root mean square from which a few values determine the range of all others. A normal
distribution reaches 6 in a million values."""

FEW_STEPS = 16
"""A channel whose largest value is fewer steps of the tensor's scale than this has less than 5 bits left."""


@dataclass
class StepSums:
    """The statistics of a step over all batches: sums and one histogram, so that memory does not grow.

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
            self.clipped += float(is_outside(a, known).sum())
        self.seen(of_float.detach().float())
        a, others = other_dimensions(a, self.channels_last)
        peaks, squares = vector_norm(a, math.inf, others), vector_norm(a, 2, others).square()
        fits = self.peaks.shape == peaks.shape  # not where the last dimension is a length that changes
        self.peaks = torch.maximum(self.peaks, peaks) if fits else peaks
        self.squares = self.squares + squares if fits else squares

    def error(self, name: str) -> StepError:
        """The step's result."""
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
            return Finding(cause or default, "give its weights 8 bits", EIGHT_BITS)
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


EIGHT_BITS = {"weight_bits": 8, "group_size": None, "weight_symmetric": True}
"""The settings of a weight in bytes: groups and zero points are of narrow ones."""


class Finding(NamedTuple):
    """A cause, advice, and the settings to change for it: None leaves the layer float, {} is no change."""

    cause: str
    advice: str = ""
    change: dict[str, Any] | None = {}  # noqa: RUF012 - never written to


def _rule(module: str, qconfig: QConfig | None, change: dict[str, Any] | None) -> str:
    """The rule of a `Recipe` for a change; "" for steps that no rule applies to."""
    if qconfig is None or change == {}:
        return ""
    pattern = json.dumps(glob.escape(module), ensure_ascii=False)
    if change is None:
        return f"{pattern}: None"
    if "activation_observer" in change:
        change = {**change, "activation_options": {}}  # of the observer that was
    return f"{pattern}: quant.{replace(qconfig, **change)}"
