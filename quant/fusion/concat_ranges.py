"""Which inputs of a concatenation share its range, and which are rescaled to that range when they are copied.

An input that only the concatenation reads is rounded once, by the range of the whole: a range of its own would round it
twice for no reader. An input with other readers keeps its own range, however wide the concatenation's is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quant.ops.step import Step


@dataclass
class Joins:
    """The result of `join`.

    Attributes:
        rescaling: outputs of the concatenations with an input of another range.
        covered: inputs that share such a concatenation's range: observing its output observes them.
    """

    rescaling: set[int] = field(default_factory=set)
    covered: set[int] = field(default_factory=set)


class Groups:
    """Groups of values with one range each, which can be joined (a union-find)."""

    def __init__(self, values: Sequence[int]) -> None:
        self._parent = {value: value for value in values}

    def find(self, value: int) -> int:
        """The value that represents the group."""
        while self._parent[value] != value:
            value = self._parent[value]
        return value

    def join(self, value: int, other: int) -> None:
        """Join the groups of two values."""
        one, two = sorted((self.find(value), self.find(other)))
        self._parent[two] = one

    def all(self) -> dict[int, list[int]]:
        """All groups by their representatives, each in order."""
        groups: dict[int, list[int]] = {}
        for value in sorted(self._parent):
            groups.setdefault(self.find(value), []).append(value)
        return groups


def join(
    cats: Sequence[Step], groups: Groups, users: Mapping[int, list[int]], keeps: Callable[[int, int], bool]
) -> Joins:
    """Join the inputs of each concatenation that have no other reader with its group.

    Args:
        cats: the concatenations, in order.
        groups: of values that are views of each other; changed in place.
        users: as from `Graph.users`.
        keeps: tells, for a group and a user of one of its values, whether the user is a view within the group.
    """
    joins = Joins()
    joined: list[tuple[Step, list[int]]] = []
    for cat in cats:
        members = groups.all()
        own = [
            members[place]
            for place in dict.fromkeys(map(groups.find, cat.inputs))
            if _only_in(cat, members[place], users, functools.partial(keeps, place))
        ]
        for group in own:
            groups.join(group[0], cat.output)
        joined += [(cat, group) for group in own]
    joins.rescaling = {
        cat.output for cat in cats if any(groups.find(value) != groups.find(cat.output) for value in cat.inputs)
    }
    for cat, group in joined:
        if cat.output in joins.rescaling:
            joins.covered.update(group)
    return joins


def _only_in(cat: Step, group: list[int], users: Mapping[int, list[int]], keeps: Callable[[int], bool]) -> bool:
    """Whether only the concatenation reads a group's values; recurrent states are read by their layer as well."""
    if group[0] < 0:
        return False
    return all(user == cat.output or keeps(user) for value in group for user in users[value])
