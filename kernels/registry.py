"""Registries: the package's own entries, those added by a call, and those of installed packages.

A package provides an entry by an entry point (packaging.python.org, "Entry points specification"). Entry points are
looked up when a name is unknown or all names are wanted, and a package is imported when its own name is wanted, or all
are. Entries are never removed or replaced, so a look-up needs no lock.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class NotLoaded(ValueError):
    """The entry of an installed package cannot be loaded; the message names the package and the reason."""


class Registry(Mapping[str, T]):
    """Name -> entry. Iterating yields what is known so far and imports nothing.

    Args:
        what: the word for an entry in errors, such as "backend".
        group: the group of entry points, such as "octet.backends".
        own: the entries of this package.
        check: (name, registered value) -> the entry; raises ValueError or TypeError where it cannot be one.
    """

    def __init__(self, what: str, group: str, own: Mapping[str, T], check: Callable[[str, Any], T]) -> None:
        self.what, self.group = what, group
        self._known: dict[str, T] = dict(own)
        self._check = check
        self._lock = threading.RLock()  # what is loaded may register itself
        self._asked: set[str] = set()
        """Names already looked up among entry points."""

    def add(self, name: str, value: object) -> T:
        """Register `value`; registering the same value again has no effect.

        Raises:
            ValueError, TypeError: it cannot be an entry, or another entry has the name.
        """
        entry = self._check(name, value)
        with self._lock:
            if name not in self._known and name not in self._asked:
                for offer in _offers(self.group, name):
                    if offer.module.partition(".")[0] != described(entry).partition(".")[0]:
                        raise ValueError(
                            f"{self.what} {name!r}: {described(entry)} is registered, and {origin_of(offer)}"
                        )
            known = self._known.setdefault(name, entry)
        if known is not entry:
            raise ValueError(
                f"{self.what} {name!r}: {described(entry)} is registered, and {described(known)} was before"
            )
        return entry

    def names(self) -> list[str]:
        """All names, including those of entry points; imports nothing."""
        return list(dict.fromkeys([*self._known, *(offer.name for offer in entry_points(group=self.group))]))

    def load_all(self) -> dict[str, str]:
        """Import all entries of installed packages; returns name -> reason for those that cannot be loaded."""
        problems: dict[str, str] = {}
        for offer in entry_points(group=self.group):
            try:
                entry = self[offer.name]
            except NotLoaded as error:
                problems[offer.name] = str(error)
                continue
            own = described(entry).partition(".")[0] == offer.module.partition(".")[0]
            if offer.name not in self._asked and not own:
                warnings.warn(
                    f"{self.what} {offer.name!r} is {described(entry)}; {origin_of(offer)}, which is not used",
                    stacklevel=3,
                )
        return problems

    def __getitem__(self, name: str) -> T:
        """The entry of that name.

        Raises:
            KeyError: there is none.
            NotLoaded: a package offers it, and it cannot be had.
        """
        known = self._known.get(name)
        return self._load(name) if known is None else known

    def _load(self, name: str) -> T:
        with self._lock:
            if name not in self._known:
                offers = _offers(self.group, name)
                if not offers:
                    raise KeyError(name)
                self._asked.add(name)
                value = _loaded(self.what, offers)
                if name not in self._known:  # its module may have registered it
                    self._known[name] = _checked(self.what, offers[0], functools.partial(self._check, name, value))
            return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._known))

    def __len__(self) -> int:
        return len(self._known)


class ClassRegistry(Generic[T]):
    """A registry by classes. An entry point has the class's full name: "package.module.Class".

    Args:
        what, group, own: as of `Registry`.
        check: (class, registered value) -> the entry.
    """

    def __init__(self, what: str, group: str, own: Mapping[type, T], check: Callable[[type, Any], T]) -> None:
        self.what, self.group = what, group
        self._known: dict[type, T] = dict(own)
        self._check = check
        self._lock = threading.RLock()

    def add(self, kind: type, value: object) -> T:
        """Register `value` for a class; registering the same value again has no effect.

        Raises:
            ValueError, TypeError: it cannot be an entry, or the class has another.
        """
        entry = self._check(kind, value)
        with self._lock:
            known = self._known.setdefault(kind, entry)
        if known != entry:  # equal are two bound methods of one class
            what = f"{self.what} of {full_name_of(kind)}"
            raise ValueError(f"{what}: {described(entry)} is registered, and {described(known)} was before")
        return entry

    def get(self, kind: type) -> T | None:
        """The entry of exactly this class; None where it has none.

        Raises:
            NotLoaded: a package offers it, and it cannot be had.
        """
        known = self._known.get(kind)
        return self._load(kind) if known is None and self._is_offered((kind,)) else known

    def nearest(self, kind: type) -> T | None:
        """The entry of this class or of its first base class that has one; raises as `get` does."""
        above = kind.__mro__
        if not self._is_offered(above):
            return next((self._known[one] for one in above if one in self._known), None)
        return next((entry for one in above if (entry := self.get(one)) is not None), None)

    def _is_offered(self, kinds: Iterable[type]) -> bool:
        offered = _offered(self.group, tuple(sys.path))
        return bool(offered) and any(full_name_of(kind) in offered for kind in kinds)

    def _load(self, kind: type) -> T:
        with self._lock:
            if kind not in self._known:
                offers = _offers(self.group, full_name_of(kind))
                value = _loaded(self.what, offers)
                if kind not in self._known:
                    self._known[kind] = _checked(self.what, offers[0], functools.partial(self._check, kind, value))
            return self._known[kind]

    def __iter__(self) -> Iterator[type]:
        return iter(list(self._known))


def described(value: object) -> str:
    """A registered value's name in errors: the full name of a class or function, or of an object's class."""
    return full_name_of(value if hasattr(value, "__qualname__") else type(value))


def full_name_of(value: Any) -> str:
    """Module and name."""
    return f"{value.__module__}.{value.__qualname__}"


def origin_of(offer: EntryPoint) -> str:
    """The package of an entry point, and what it names, for errors."""
    return f"{_distribution(offer)} offers one of that name ({offer.value})"


def _distribution(offer: EntryPoint) -> str:
    return "a package" if offer.dist is None else f"{offer.dist.name} {offer.dist.version}"


def _offers(group: str, name: str) -> list[EntryPoint]:
    return list(entry_points(group=group, name=name))


@functools.lru_cache(maxsize=8)
def _offered(group: str, path: tuple[str, ...]) -> frozenset[str]:
    """The names of a group's entry points, of packages on sys.path, which is `path`. Kept, as every class asks."""
    return frozenset(offer.name for offer in entry_points(group=group))


def _loaded(what: str, offers: Iterable[EntryPoint]) -> Any:
    first, *others = offers
    if others:
        who = " and ".join(f"{_distribution(one)} ({one.value})" for one in (first, *others))
        raise NotLoaded(f"{what} {first.name!r}: {who} offer it; uninstall all but one")
    try:
        return first.load()
    except Exception as error:
        raise NotLoaded(
            f"{what} {first.name!r}: {_distribution(first)} offers it by the entry point {first.value}, which does not "
            f"load: {type(error).__name__}: {error}"
        ) from error


def _checked(what: str, offer: EntryPoint, check: Callable[[], T]) -> T:
    try:
        return check()
    except (TypeError, ValueError) as error:
        raise NotLoaded(f"{error} ({_distribution(offer)} offers it by the entry point {offer.value})") from error
