"""The registries of observers and of fake quantisers that learn, by their names in recipes and JSON."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from quant.kernels import ACTIVATION_U8, QScheme
from quant.kernels.registry import Registry, described
from quant.observers.base import Observer, RangeObserver
from quant.observers.entropy import EntropyObserver
from quant.observers.fake_quantize import FakeQuantizeBase
from quant.observers.fixed import FixedObserver
from quant.observers.histogram import HistogramObserver
from quant.observers.lsq import LSQFakeQuantize, LSQPlusFakeQuantize
from quant.observers.minmax import MinMaxObserver
from quant.observers.moving_average import MovingAverageObserver
from quant.observers.mse import MSEObserver
from quant.observers.pact import PACTFakeQuantize
from quant.observers.percentile import PercentileObserver

AUTO = "auto"
"""In place of an observer's name in a recipe: the phase chooses."""

PER_CALL = "dynamic"
"""In place of an observer's name in a recipe: each call has ranges of its own, and nothing is observed."""

K = TypeVar("K", bound="type[Observer] | type[FakeQuantizeBase]")
B = TypeVar("B", Observer, FakeQuantizeBase)

_OWN: dict[str, type[Observer] | type[FakeQuantizeBase]] = {
    "minmax": MinMaxObserver,
    "moving_average": MovingAverageObserver,
    "histogram": HistogramObserver,
    "percentile": PercentileObserver,
    "entropy": EntropyObserver,
    "mse": MSEObserver,
    "fixed": FixedObserver,
    "lsq": LSQFakeQuantize,
    "lsq+": LSQPlusFakeQuantize,
    "pact": PACTFakeQuantize,
}
"""A new observer of the package is a file and a line here."""


def _as_kind(name: str, value: Any) -> type[Observer] | type[FakeQuantizeBase]:
    """A registered value as a class that recipes can name."""
    if not isinstance(value, type) or not issubclass(value, (Observer, FakeQuantizeBase)):
        raise TypeError(
            f"observer {name!r}: expected a subclass of quant.observers.Observer or FakeQuantizeBase, got "
            f"{described(value)}"
        )
    if not isinstance(name, str) or not name or name in (AUTO, PER_CALL):
        raise ValueError(
            f"observer {name!r}: {described(value)} needs a name that is not empty, {AUTO!r} or {PER_CALL!r}"
        )
    missing = sorted(value.__abstractmethods__)
    looks = ("_update", "_add", "_observe", "forward")
    if issubclass(value, Observer) and all(getattr(value, one) is getattr(Observer, one) for one in looks):
        missing.append("_update")
    if missing:
        raise ValueError(f"observer {name!r}: {described(value)} has no {' and no '.join(missing)}")
    scheme, *options = inspect.signature(value).parameters.values()
    if scheme.kind is scheme.KEYWORD_ONLY or any(one.kind is not one.KEYWORD_ONLY for one in options):
        raise ValueError(
            f"observer {name!r}: the constructor of {described(value)} takes {inspect.signature(value)}, expected the "
            "scheme first and options by keyword alone: (self, scheme=ACTIVATION_U8, *, ...)"
        )
    return value  # type: ignore[no-any-return]


_REGISTRY = Registry("observer", "octet.observers", _OWN, _as_kind)


class _Named(Mapping[str, type[B]]):
    """The entries of the registry of one base class."""

    def __init__(self, base: Any) -> None:
        self._base: type[B] = base

    def __getitem__(self, name: str) -> type[B]:
        if name in (AUTO, PER_CALL):  # asked for often, and no package offers it
            raise KeyError(name)
        kind: Any = _REGISTRY[name]
        if not issubclass(kind, self._base):
            raise KeyError(name)
        return kind  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return (name for name, kind in _REGISTRY.items() if issubclass(kind, self._base))

    def __len__(self) -> int:
        return len(list(iter(self)))


OBSERVERS: Mapping[str, type[Observer]] = _Named(Observer)
"""Observers by their names in recipes and JSON. Those of installed packages are imported when first asked for."""

LEARNED: Mapping[str, type[FakeQuantizeBase]] = _Named(FakeQuantizeBase)
"""Fake quantisers that learn their range, by name. FakeQuantize(observer) is the one that observes it."""

_SET_BY_TRAINING = {"channels", "per_sample", "distributed"}
"""Keywords of constructors that the layer or the process group determines, so that recipes do not set them."""


def register(name: str) -> Callable[[K], K]:
    """A decorator for a class of observers, or of fake quantisers that learn, that recipes are to have by this name.

    The constructor takes the scheme first; its keyword-only arguments are the options of recipes, which are numbers. A
    package that is installed needs no call: an entry point of the group "octet.observers", by that name, is the class.

    Raises:
        ValueError, TypeError: it is not such a class, or another has the name.
    """

    def added(kind: K) -> K:
        _REGISTRY.add(name, kind)
        return kind

    return added


def names() -> list[str]:
    """All names, including those of installed packages; imports nothing."""
    return _REGISTRY.names()


def by_hand(name: str) -> bool:
    """Whether the options of the observer of that name are the range itself, which applies to one value only."""
    return name in OBSERVERS and OBSERVERS[name].by_hand


def follows_batches(name: str) -> bool:
    """Whether the range of the observer of that name depends on the order of batches."""
    return name in OBSERVERS and OBSERVERS[name].follows_batches


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
    return name in LEARNED or issubclass(OBSERVERS[name], RangeObserver) or by_hand(name)


def takes(name: str, keyword: str) -> bool:
    """Whether the constructor of that name has a keyword, of those that recipes do not set."""
    return keyword in _keywords(name)


def _keywords(name: str) -> dict[str, inspect.Parameter]:
    kind: Any = _REGISTRY[name]
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
    quantizer: FakeQuantizeBase = _make(LEARNED, "learned fake quantiser", name, scheme, options)
    return quantizer


def _make(known: Mapping[str, type[Any]], kind: str, name: str, scheme: QScheme, options: dict[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"no {kind} is called {name!r}, expected one of {', '.join(known)}")
    try:
        return known[name](scheme, **options)
    except TypeError as error:
        raise ValueError(f"{kind} {name!r}: options {options} do not fit its constructor ({error})") from error
