"""The report of a calibration: a row per observer, with its range and warnings. Observers are only read.

Each warning says what was measured and what may help. Shares are computed from the histogram, so observers without one
(min-max, moving average, fixed) are checked by their extremes only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from quant.calibrate.errors import listed
from quant.kernels import QParams
from quant.observers import ChannelMean, FixedObserver, Observer
from quant.observers._histogram_store import HistogramStore, RowView
from torch import nn

SPREAD = 32.0
"""Largest magnitude over the 99.9th percentile: from here on a min-max range loses 5 of 8 bits to one value in 1000."""

CLIPPED = 0.01
"""Share of all values beyond one end of the range that was chosen."""

VANISHED = 0.9
"""Share of values that round to zero, where zeros may be meant (ReLU, padding)."""

VANISHED_NONZERO = 0.25
"""The same where no value is zero, so that each of them is lost."""

USED = 1 / 8
"""Share of the integers that the values can fall on, because they lie far from zero: under 5 of 8 bits."""

CHANNEL_SPREAD = 100.0
"""Widest channel over narrowest."""

SHOWN = 3
"""Most channels of an observer that warnings name; further ones are counted."""


@dataclass(frozen=True)
class Row:
    """One observer.

    Attributes:
        layer: the observer's `name` where it has one, else its module's.
        observer: class name; "Given" where the range was given by hand.
        channels: how many ranges; 1 per tensor.
        low, high: extremes of the finite values seen; NaN where there were none.
        chosen_low, chosen_high: the real values of the smallest and largest integer; NaN where there is no range.
        nan_count, inf_count: values left out.
        warnings: texts; empty for a layer without any.
    """

    layer: str
    observer: str
    channels: int
    low: float
    high: float
    chosen_low: float
    chosen_high: float
    nan_count: int
    inf_count: int
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; NaN becomes None."""
        return {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in asdict(self).items()
        }


@dataclass(frozen=True)
class Suspicion:
    """What a range shows about the data.

    Attributes:
        layer: as of `Row`.
        text: as in `Row.warnings`.
        grave: whether int8 cannot be right by such data: every input always had one value. The rest may be meant, or
            the model's nature, as a dead layer.
    """

    layer: str
    text: str
    grave: bool


def suspicions(observers: Mapping[str, Observer]) -> list[Suspicion]:
    """What the extremes show of all observers that choose a range.

    What clips is not among it, which wants the ranges: to choose them takes a large network seconds.
    """
    with_range = {name: one for name, one in observers.items() if _has_range(one) and not one.by_hand}
    usable = {name: one for name, one in with_range.items() if not unseen({name: one})}
    inputs = [one for one in usable.values() if one.of_input and one.low.numel()]
    constant = bool(inputs) and all(torch.equal(one.low, one.high) for one in inputs)
    return [
        Suspicion(observer.name or name, text, constant and observer.of_input)
        for name, observer in usable.items()
        for text in _of_extremes(observer)
    ]


def ranges(prepared: nn.Module) -> list[Row]:
    """A row for every observer in the model, in the order of its modules."""
    observers = ((name, module) for name, module in prepared.named_modules() if _has_range(module))
    return [_row(name, observer) for name, observer in observers]


def _has_range(module: nn.Module) -> bool:
    return isinstance(module, Observer) and not isinstance(module, ChannelMean)


def _is_given(observer: Observer) -> bool:
    """Whether the range was set by hand."""
    return observer.given is not None and not isinstance(observer, FixedObserver)


def unseen(observers: Mapping[str, Observer]) -> list[str]:
    """The layers whose observer cannot give a range, as it (or some of its channels) saw no finite value."""
    layers = []
    for name, observer in observers.items():
        if not _has_range(observer) or not observer.needs_data:
            continue
        empty = observer.low > observer.high
        if observer.low.numel() == 0 or bool(empty.all()):
            layers.append(observer.name or name)
        elif bool(empty.any()):
            layers.append(f"{observer.name or name} (channels {empty.nonzero().flatten().tolist()})")
    return layers


def table(rows: Sequence[Row]) -> str:
    """The rows as a printable table: layer, observer, extremes, chosen range, and a mark where there are warnings."""
    head = ("layer", "observer", "channels", "seen", "range", "")
    cells = [
        (
            row.layer or "(root)",
            row.observer.removesuffix("Observer"),
            str(row.channels),
            _interval(row.low, row.high),
            _interval(row.chosen_low, row.chosen_high),
            "!" if row.warnings else "",
        )
        for row in rows
    ]
    widths = [max(len(cell[i]) for cell in [head, *cells]) for i in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True)) for cell in [head, *cells]]
    return "\n".join(line.rstrip() for line in lines)


def warnings_of(rows: Iterable[Row]) -> list[str]:
    """Every warning as a line that begins with the layer."""
    return [f"{row.layer or '(root)'}: {text}" for row in rows for text in row.warnings]


def _row(name: str, observer: Observer) -> Row:
    usable = not unseen({name: observer})
    seen = observer.low <= observer.high
    low, high = (observer.low[seen], observer.high[seen]) if seen.any() else (observer.low.new_tensor([math.nan]),) * 2
    qparams = observer.qparams() if usable else None
    chosen = qparams.ends() if qparams is not None else low.new_tensor([[math.nan, math.nan]])
    return Row(
        layer=observer.name or name,
        observer="Given" if _is_given(observer) else type(observer).__name__,
        channels=max(observer.low.numel(), 1),
        low=low.min().item(),
        high=high.max().item(),
        chosen_low=chosen[:, 0].min().item(),
        chosen_high=chosen[:, 1].max().item(),
        nan_count=int(observer.nan_count),
        inf_count=int(observer.inf_count),
        warnings=tuple(_suspicions(observer, qparams)),
    )


def _suspicions(observer: Observer, qparams: QParams | None) -> list[str]:
    texts = []
    if observer.nan_count or observer.inf_count:
        texts.append(
            f"{int(observer.nan_count)} NaN and {int(observer.inf_count)} infinite values were left out: look for a "
            "division, log or square root in the float model, or bad samples"
        )
    if qparams is None:
        return [*texts, "saw no finite value and has no range: the data never reaches it; give data that does"]
    return [*texts, *_of_range(observer, qparams)]


def _of_range(observer: Observer, qparams: QParams) -> list[str]:
    texts = _of_given(observer, qparams)
    if isinstance(observer, FixedObserver) or not bool((observer.low <= observer.high).any()):
        return texts
    return [*texts, *_of_extremes(observer), *_of_histogram(observer, qparams)]


def _of_given(observer: Observer, qparams: QParams) -> list[str]:
    """Data that a range by hand does not hold, by a step and more; a histogram knows the share, and says that instead.

    An observer's own range may clip, with reason.
    """
    seen = observer.low <= observer.high
    if observer.given is None or isinstance(observer, HistogramStore) or not bool(seen.any()):
        return []
    low, high = observer.low[seen].min().item(), observer.high[seen].max().item()
    ends, step = qparams.ends(), qparams.scale.max().item()
    first, last = ends[:, 0].min().item(), ends[:, 1].max().item()
    if low >= first - step and high <= last + step:
        return []
    return [
        f"values reach from {low:.4g} to {high:.4g}, and the range set by hand ends at {first:.4g} and {last:.4g}: "
        "what lies beyond is clipped"
    ]


def _of_extremes(observer: Observer) -> list[str]:
    suspicions = []
    low, high = observer.low.double(), observer.high.double()
    constant = (low == high).nonzero().flatten().tolist()
    if constant:
        which = f"channels {listed(constant)} are" if observer.scheme.axis is not None else f"is always {low[0]:.4g},"
        suspicions.append(f"{which} constant: a dead layer, or too little data")
    width = torch.maximum(high, high.new_zeros(())) - torch.minimum(low, low.new_zeros(()))
    # Not where all is zero, which needs no levels.
    wasteful = ((high - low) < USED * width) & (low != high)
    if bool(wasteful.any()):
        row = int(wasteful.nonzero()[0])
        suspicions.append(
            f"values lie in [{low[row]:.4g}, {high[row]:.4g}], far from zero, and share few of the integers: subtract "
            "their mean before, or keep it float"
        )
    if observer.scheme.axis is not None and width.numel() > 1:
        spread = width.max() / width[width > 0].min() if bool((width > 0).any()) else width.new_ones(())
        if spread > CHANNEL_SPREAD:
            suspicions.append(
                f"the widest of {width.numel()} channels has {spread:.3g} times the range of the narrowest: keep it "
                "per channel, or equalise the layers around it"
            )
    return suspicions


def _of_histogram(observer: Observer, qparams: QParams) -> list[str]:
    if not isinstance(observer, HistogramStore):
        return []
    suspicions: list[str] = []
    suspicious = 0
    ends, scales = qparams.ends(), qparams.scale.reshape(-1).double().cpu()
    for index, exponent in enumerate(observer.exponents()):
        low, high = observer.low[index].item(), observer.high[index].item()
        if exponent is None or low == high:
            continue
        row = RowView(observer.counts[index].cpu(), 2.0**exponent, low, high)
        half_step = scales[index].item() / 2
        where = f"channel {index}: " if observer.scheme.axis is not None else ""
        suspicions_of_row = _of_row(
            row, ends[index, 0].item(), ends[index, 1].item(), half_step, by_hand=_is_given(observer)
        )
        suspicious += bool(suspicions_of_row)
        if suspicious <= SHOWN:
            suspicions += [where + text for text in suspicions_of_row]
    if suspicious > SHOWN:
        suspicions.append(f"the same or similar of {suspicious - SHOWN} more channels")
    return suspicions


def _of_row(row: RowView, chosen_low: float, chosen_high: float, half_step: float, *, by_hand: bool) -> list[str]:
    """Warnings about one histogram for integers that reach from chosen_low to chosen_high."""
    suspicions = []
    total = int(row.counts.sum())
    largest = max(-row.low, row.high)
    rank = int(torch.searchsorted(row.magnitudes.cumsum(0), math.ceil(0.999 * total)))
    usual = (rank + 1) * row.width
    if largest > SPREAD * usual:
        suspicions.append(
            f"the largest magnitude, {largest:.4g}, is over {largest / usual:.0f} times the 99.9th percentile: "
            "outliers; the percentile or histogram observer leaves them out"
        )
    # Bins that lie wholly outside, by more than rounding brings back.
    below = int(row.counts[row.upper_edges < chosen_low - half_step].sum()) / total
    above = int(row.counts[row.lower_edges > chosen_high + half_step].sum()) / total
    for share, end in ((below, "below"), (above, "above")):
        if share > CLIPPED:
            suspicions.append(
                f"{share:.1%} of the values lie {end} the range [{chosen_low:.4g}, {chosen_high:.4g}] and are clipped: "
                f"{'widen it' if by_hand else 'try the minmax observer'}"
            )
    lost = _lost(row, half_step)
    if lost:
        suspicions.append(
            f"{lost:.0%} of the values round to zero: 8 bits with one scale cannot hold this range; keep the layer "
            "float, take 16 bits, or give it the logarithm"
        )
    return suspicions


def lost_share(observer: Observer) -> float:
    """The share of an observer's values that round to zero, where that is too large to be meant; else 0.

    Of a per-tensor observer with a histogram; another cannot tell, and gives 0.
    """
    if not isinstance(observer, HistogramStore) or observer.scheme.axis is not None or unseen({"": observer}):
        return 0.0
    [exponent], low, high = observer.exponents(), observer.low[0].item(), observer.high[0].item()
    if exponent is None or low == high:
        return 0.0
    return _lost(RowView(observer.counts[0].cpu(), 2.0**exponent, low, high), observer.qparams().scale.item() / 2)


def _lost(row: RowView, half_step: float) -> float:
    vanished = int(row.counts[(row.lower_edges > -half_step) & (row.upper_edges < half_step)].sum())
    share = vanished / int(row.counts.sum())
    no_zeros = row.low > 0.0 or row.high < 0.0
    may_be_zeros = row.low == 0.0 or row.high == 0.0  # a ReLU before it: then no share is too large
    return share if share > (VANISHED_NONZERO if no_zeros else VANISHED) and not may_be_zeros else 0.0


def _interval(low: float, high: float) -> str:
    return "none" if math.isnan(low) else f"[{low:.4g}, {high:.4g}]"
