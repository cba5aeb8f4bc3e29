"""Names in recipes: each makes its class, and a wrong one says what there is."""

from __future__ import annotations

import pytest
import quant.observers as observers
from quant.kernels import WEIGHT_S8, weight_scheme
from quant.observers import LEARNED, OBSERVERS, PercentileObserver, make_learned, make_observer


@pytest.mark.parametrize("name", list(OBSERVERS))
def test_every_name_makes_its_class(name: str) -> None:
    observer = make_observer(name, WEIGHT_S8)
    assert type(observer) is OBSERVERS[name]
    assert observer.scheme == WEIGHT_S8


@pytest.mark.parametrize("name", list(LEARNED))
def test_every_learned_name_makes_its_class(name: str) -> None:
    scheme = weight_scheme(4, None)
    module = make_learned(name, scheme)
    assert type(module) is LEARNED[name]
    assert module.scheme == scheme


def test_options_reach_the_constructor() -> None:
    observer = make_observer("percentile", percentile=99.0, bins=1024)
    assert isinstance(observer, PercentileObserver)
    assert (observer.percentile, observer.bins) == (99.0, 1024)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'kl'.*minmax.*entropy"):
        make_observer("kl")
    with pytest.raises(ValueError, match=r"'lsq2'.*lsq\+"):
        make_learned("lsq2")


def test_an_unknown_option_names_it() -> None:
    with pytest.raises(ValueError, match="percentil"):
        make_observer("percentile", percentil=99.0)


def test_everything_exported_exists_and_every_observer_is_registered() -> None:
    exported = {getattr(observers, name) for name in observers.__all__ if isinstance(getattr(observers, name), type)}
    concrete = {
        each
        for each in exported
        if issubclass(each, observers.Observer) and each not in (observers.Observer, observers.RangeObserver)
    }
    concrete.remove(observers.ChannelMean)  # gives no range, so no recipe can ask for it
    assert concrete == set(OBSERVERS.values())
