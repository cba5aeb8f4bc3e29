"""What was seen -> ranges; and fake quantisation, which trains with them. README.md says which to choose when."""

from __future__ import annotations

from typing import Any

from quant.kernels import ACTIVATION_U8, QScheme
from quant.observers.base import NoDataSeen, Observer, RangeObserver
from quant.observers.channel_mean import ChannelMean
from quant.observers.entropy import EntropyObserver
from quant.observers.fake_quantize import FakeQuantize, FakeQuantizeBase, ScaleCollapsed
from quant.observers.fixed import FixedObserver
from quant.observers.histogram import HistogramObserver
from quant.observers.lsq import LSQFakeQuantize, LSQPlusFakeQuantize
from quant.observers.minmax import MinMaxObserver
from quant.observers.moving_average import MovingAverageObserver
from quant.observers.mse import MSEObserver
from quant.observers.pact import PACTFakeQuantize
from quant.observers.percentile import PercentileObserver

OBSERVERS: dict[str, type[Observer]] = {
    "minmax": MinMaxObserver,
    "moving_average": MovingAverageObserver,
    "histogram": HistogramObserver,
    "percentile": PercentileObserver,
    "entropy": EntropyObserver,
    "mse": MSEObserver,
    "fixed": FixedObserver,
}
"""Observers by their name in recipes and JSON. A new observer is a file and a line here."""

LEARNED: dict[str, type[FakeQuantizeBase]] = {
    "lsq": LSQFakeQuantize,
    "lsq+": LSQPlusFakeQuantize,
    "pact": PACTFakeQuantize,
}
"""Fake quantisers that learn their range, by name. FakeQuantize(observer) is the one that observes it."""


def make_observer(name: str, scheme: QScheme = ACTIVATION_U8, **options: Any) -> Observer:
    """The observer of that name; `options` are its constructor's keywords, such as percentile=99.9.

    Raises:
        ValueError: no observer has that name, or it has no such option, or not such a value.
    """
    made: Observer = _make(OBSERVERS, "observer", name, scheme, options)
    return made


def make_learned(name: str, scheme: QScheme = ACTIVATION_U8, **options: Any) -> FakeQuantizeBase:
    """The learned fake quantiser of that name; as make_observer."""
    made: FakeQuantizeBase = _make(LEARNED, "learned fake quantiser", name, scheme, options)
    return made


def _make(known: dict[str, type[Any]], kind: str, name: str, scheme: QScheme, options: dict[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"no {kind} is called {name!r}, expected one of {', '.join(known)}")
    try:
        return known[name](scheme, **options)
    except TypeError as error:
        raise ValueError(f"{kind} {name!r}: options {options} do not fit its constructor ({error})") from error


__all__ = [
    "LEARNED",
    "OBSERVERS",
    "ChannelMean",
    "EntropyObserver",
    "FakeQuantize",
    "FakeQuantizeBase",
    "FixedObserver",
    "HistogramObserver",
    "LSQFakeQuantize",
    "LSQPlusFakeQuantize",
    "MSEObserver",
    "MinMaxObserver",
    "MovingAverageObserver",
    "NoDataSeen",
    "Observer",
    "PACTFakeQuantize",
    "PercentileObserver",
    "RangeObserver",
    "ScaleCollapsed",
    "make_learned",
    "make_observer",
]
