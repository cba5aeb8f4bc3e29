"""Which inputs of a concatenation have its range, and which are given that range when they are copied into it.

What only a concatenation reads is rounded once, by the range of the whole: a range of its own would be one rounding
more for nobody. What others read as well keeps a range of its own, however wide the rest of the concatenation is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quant.ops.step import Step


@dataclass
class Joins:
    """What `join` found.

    Attributes:
        rescaling: outputs of the concatenations with an input whose range is another.
        covered: values that have the range of such a concatenation and are part of it, so that to look at the whole is
            to look at them.
    """

    rescaling: set[int] = field(default_factory=set)
    covered: set[int] = field(default_factory=set)


class Groups:
    """Values that have one range each with others, while groups grow (a union-find)."""

    def __init__(self, values: Sequence[int]) -> None:
        self._parent = {value: value for value in values}

    def find(self, value: int) -> int:
        """The value that stands for the group."""
        while self._parent[value] != value:
            value = self._parent[value]
        return value

    def join(self, value: int, other: int) -> None:
        """One range for both groups."""
        one, two = sorted((self.find(value), self.find(other)))
        self._parent[two] = one

    def all(self) -> dict[int, list[int]]:
        """The groups, each in order."""
        groups: dict[int, list[int]] = {}
        for value in sorted(self._parent):
            groups.setdefault(self.find(value), []).append(value)
        return groups


def join(
    cats: Sequence[Step], groups: Groups, users: Mapping[int, list[int]], keeps: Callable[[int, int], bool]
) -> Joins:
    """Put the inputs of each concatenation that nobody else reads into its group.

    Args:
        cats: in order.
        groups: of values that are the same numbers moved about; changed.
        users: of `Graph.users`.
        keeps: of a value's group (first) and a user of the value, whether that only moves it within the group.
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
    """Whether a group's values are read for the concatenation alone; states are read in their layer as well."""
    if group[0] < 0:
        return False
    return all(user == cat.output or keeps(user) for value in group for user in users[value])
