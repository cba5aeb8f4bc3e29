"""Registries: who may add what, what installed packages offer, and that nothing is imported which nobody asked for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quant.kernels.registry import ClassRegistry, NotLoaded, Registry

GROUP = "octet.test_things"


class Thing:
    """What the registries of these tests hold."""


def checked(name: object, value: Any) -> Thing:
    if not isinstance(value, Thing):
        raise TypeError(f"thing {name!r}: expected a Thing")
    return value


@pytest.fixture
def things() -> Registry[Thing]:
    return Registry("thing", GROUP, {"own": Thing()}, checked)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """install(distribution, module's source, name=value, ...) puts a package with these entry points on sys.path."""
    before = set(sys.modules)

    def made(distribution: str, source: str, **offers: str) -> None:
        folder = tmp_path / distribution
        (folder / f"{distribution}-1.0.dist-info").mkdir(parents=True)
        about = folder / f"{distribution}-1.0.dist-info"
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in offers.items()]
        (about / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
        (folder / f"{distribution}.py").write_text(source)
        monkeypatch.syspath_prepend(folder)

    yield made
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


MODULE = "from test_registry_thing import Thing\nTHING = Thing()\n"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Thing`, for modules that tests write."""
    monkeypatch.setitem(sys.modules, "test_registry_thing", sys.modules[__name__])


def test_what_is_added_is_there_by_its_name(things: Registry[Thing]) -> None:
    thing = Thing()
    assert things.add("mine", thing) is thing
    assert things["mine"] is thing
    assert list(things) == ["own", "mine"]
    assert "other" not in things


def test_the_same_once_more_changes_nothing(things: Registry[Thing]) -> None:
    thing = Thing()
    assert things.add("mine", thing) is things.add("mine", thing)
    assert len(things) == 2


def test_a_name_that_is_taken_says_by_whom(things: Registry[Thing]) -> None:
    class Other(Thing):
        pass

    with pytest.raises(ValueError, match=r"thing 'own': .*\.Other is registered, and .*\.Thing was before"):
        things.add("own", Other())
    assert type(things["own"]) is Thing


def test_what_is_no_thing_is_refused(things: Registry[Thing]) -> None:
    with pytest.raises(TypeError, match="thing 'mine': expected a Thing"):
        things.add("mine", 3)
    assert "mine" not in things


def test_of_many_threads_one_wins_and_the_others_are_told(things: Registry[Thing]) -> None:
    barrier, told = threading.Barrier(8), []

    def add() -> None:
        barrier.wait()
        try:
            things.add("mine", Thing())
        except ValueError as error:
            told.append(error)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 7


def test_a_package_is_imported_when_its_name_is_asked_for(
    things: Registry[Thing], install: Callable[..., None]
) -> None:
    install("toy_one", MODULE, one="toy_one:THING")
    assert things.names() == ["own", "one"]
    assert list(things) == ["own"]
    assert things.get("two") is None
    assert "toy_one" not in sys.modules
    assert things["one"] is sys.modules["toy_one"].THING
    assert list(things) == ["own", "one"]


def test_a_package_may_also_register_itself(things: Registry[Thing], install: Callable[..., None]) -> None:
    sys.modules[__name__].REGISTRY = things  # type: ignore[attr-defined]
    install(
        "toy_self",
        f"{MODULE}from test_registry_thing import REGISTRY\nREGISTRY.add('me', THING)\n",
        me="toy_self:THING",
    )
    assert things["me"] is sys.modules["toy_self"].THING


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('no licence')", "toy_bad 1.0 offers it by the entry point toy_bad:THING, .*: no licence"),
        ("", "toy_bad:THING, which does not load: AttributeError"),
        ("THING = 3", r"expected a Thing \(toy_bad 1.0 offers it by the entry point toy_bad:THING\)"),
    ],
    ids=["fails", "lacks it", "is none"],
)
def test_a_package_that_does_not_keep_its_word_is_named(
    things: Registry[Thing], install: Callable[..., None], source: str, message: str
) -> None:
    install("toy_bad", source, bad="toy_bad:THING")
    with pytest.raises(NotLoaded, match=message):
        things["bad"]
    assert list(things.load_all()) == ["bad"]
    assert "bad" not in list(things)


def test_two_packages_of_one_name_are_both_named(things: Registry[Thing], install: Callable[..., None]) -> None:
    install("toy_left", MODULE, both="toy_left:THING")
    install("toy_right", MODULE, both="toy_right:THING")
    with pytest.raises(NotLoaded, match=r"toy_(left|right) 1.0 \(toy_.*\) and toy_.* offer it; uninstall all but one"):
        things["both"]


def test_a_call_does_not_take_the_name_of_an_installed_package(
    things: Registry[Thing], install: Callable[..., None]
) -> None:
    install("toy_taken", MODULE, taken="toy_taken:THING")
    with pytest.raises(ValueError, match=r"Thing is registered, and toy_taken 1.0 offers one .* \(toy_taken:THING\)"):
        things.add("taken", Thing())
    assert "toy_taken" not in sys.modules


def test_an_offer_of_a_name_that_is_taken_is_warned_of(things: Registry[Thing], install: Callable[..., None]) -> None:
    install("toy_late", MODULE, own="toy_late:THING")
    with pytest.warns(UserWarning, match=r"thing 'own' is .*Thing; toy_late 1.0 offers one .*, which is not used"):
        assert things.load_all() == {}
    assert "toy_late" not in sys.modules


def test_classes_have_entries_by_their_full_name(install: Callable[..., None]) -> None:
    kinds: ClassRegistry[Thing] = ClassRegistry("thing", GROUP, {}, checked)
    name = f"{Thing.__module__}.Thing"
    install("toy_kind", MODULE, **{name: "toy_kind:THING"})
    assert kinds.get(Registry) is None
    assert "toy_kind" not in sys.modules
    assert kinds.get(Thing) is sys.modules["toy_kind"].THING
    assert list(kinds) == [Thing]
    with pytest.raises(ValueError, match=r"thing of .*Thing: .* is registered, and .* was before"):
        kinds.add(Thing, Thing())


def test_the_nearest_class_with_an_entry_decides(install: Callable[..., None]) -> None:
    class Middle(Thing):
        pass

    class Low(Middle):
        pass

    kinds: ClassRegistry[Thing] = ClassRegistry("thing", GROUP, {}, checked)
    assert kinds.nearest(Low) is None
    top = kinds.add(Thing, Thing())
    assert kinds.nearest(Low) is top
    install("toy_middle", MODULE, **{f"{Middle.__module__}.{Middle.__qualname__}": "toy_middle:THING"})
    assert kinds.nearest(Low) is sys.modules["toy_middle"].THING
    assert kinds.nearest(Thing) is top
