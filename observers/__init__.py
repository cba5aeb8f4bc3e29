"""What was seen -> ranges; and fake quantisation, which trains with them. README.md says which to choose when."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
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

_SET_BY_TRAINING = {"channels", "per_sample", "distributed"}
"""Keywords of constructors that follow from the layer or the process group, and that no recipe sets."""


def option_names(name: str) -> tuple[str, ...]:
    """The options that a recipe may give to the observer or learned fake quantiser of that name."""
    return tuple(each for each in _keywords(name) if each not in _SET_BY_TRAINING)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError, with the legal ones, for options that the observer of that name does not know or take."""
    known = option_names(name)
    unknown = [each for each in options if each not in known]
    if unknown:
        takes = ", ".join(known) if known else "none"
        raise ValueError(f"observer {name!r} has no option {', '.join(map(repr, unknown))}; its options: {takes}")
    missing = [each for each, parameter in _keywords(name).items() if parameter.default is parameter.empty]
    missing = [each for each in missing if each not in options]
    if missing:
        raise ValueError(f"observer {name!r} needs the options {', '.join(map(repr, missing))}")
    if options:
        (make_observer if name in OBSERVERS else make_learned)(name, **options)  # which checks their values


def trains(name: str) -> bool:
    """Whether activations in training can have the observer of that name: it learns, or needs no search."""
    return name in LEARNED or issubclass(OBSERVERS[name], (RangeObserver, FixedObserver))


def _keywords(name: str) -> dict[str, inspect.Parameter]:
    kind: Any = OBSERVERS[name] if name in OBSERVERS else LEARNED[name]
    parameters = inspect.signature(kind).parameters
    return {each: one for each, one in parameters.items() if one.kind is one.KEYWORD_ONLY}


def make_observer(name: str, scheme: QScheme = ACTIVATION_U8, **options: Any) -> Observer:
    """The observer of that name; `options` are its constructor's keywords, such as percentile=99.9.

    Raises:
        ValueError: no observer has that name, or it has no such option, or not such a value.
    """
    observer: Observer = _make(OBSERVERS, "observer", name, scheme, options)
    return observer


def make_learned(name: str, scheme: QScheme = ACTIVATION_U8, **options: Any) -> FakeQuantizeBase:
    """The learned fake quantiser of that name; as make_observer."""
    fake_quantizer: FakeQuantizeBase = _make(LEARNED, "learned fake quantiser", name, scheme, options)
    return fake_quantizer


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
    "check_options",
    "make_learned",
    "make_observer",
    "option_names",
    "trains",
]
