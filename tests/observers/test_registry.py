"""Names in recipes: each makes its class, and a wrong one says what there is."""

from __future__ import annotations

import pytest
import quant.observers as observers
from quant.kernels import WEIGHT_S8, weight_scheme
from quant.observers import (
    LEARNED,
    OBSERVERS,
    PercentileObserver,
    make_learned,
    make_observer,
    option_names,
    trains,
)


@pytest.mark.parametrize("name", list(OBSERVERS))
def test_every_name_makes_its_class(name: str) -> None:
    observer = make_observer(name, WEIGHT_S8, **({"low": -1.0, "high": 1.0} if name == "fixed" else {}))
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


@pytest.mark.parametrize(
    ("name", "options"),
    [("percentile", ("percentile", "bins")), ("fixed", ("low", "high")), ("minmax", ()),
     ("moving_average", ("momentum",)), ("lsq", ()), ("pact", ("alpha",))],
)  # fmt: skip
def test_options_of_a_recipe_are_those_that_the_layer_does_not_decide(name: str, options: tuple[str, ...]) -> None:
    assert option_names(name) == options


def test_training_takes_what_needs_no_search() -> None:
    assert [name for name in [*OBSERVERS, *LEARNED] if trains(name)] == [
        "minmax", "moving_average", "fixed", "lsq", "lsq+", "pact",
    ]  # fmt: skip


def test_ends_have_no_default() -> None:
    with pytest.raises(ValueError, match="'low' and 'high'"):
        make_observer("fixed")


def test_everything_exported_exists_and_every_observer_is_registered() -> None:
    exported = {getattr(observers, name) for name in observers.__all__ if isinstance(getattr(observers, name), type)}
    concrete = {
        each
        for each in exported
        if issubclass(each, observers.Observer) and each not in (observers.Observer, observers.RangeObserver)
    }
    concrete.remove(observers.ChannelMean)  # gives no range, so no recipe can ask for it
    assert concrete == set(OBSERVERS.values())
