"""Numbers of a recording that another one, of other sizes, has shown too little about.

A forward may use a number where nothing notes it, as in `range(n)` or `parts[:n]`. Another recording shows such a use
where the number is far from what it was. Five kinds may not be: what rounding gives is often the same for other
operands; a size behind a stride is often the same for other sizes of the inputs; `range(0, n, 4)` counts the same for
sizes that are near each other; lists may be shorter than all sizes but the smallest; and of a few places every second
or fourth one is the first. So recordings with further sizes follow (`variations.UNCOVER`) while there are such.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from quant.capture.recorder import Recorder
from quant.capture.variations import ENOUGH, FAR, FARTHER, FEW, HALF, ONE, TWICE_AND_ONE, UNCOVER
from quant.graph import Kind
from quant.runtime.trees import Ref

SMALLEST = (ONE, FEW, HALF)
"""The changes that make a size smaller."""

HIDDEN = 2
"""A size of at most this may be the same for smaller inputs, behind a larger stride, and for some twice as large."""


@dataclass(frozen=True)
class Unmoved:
    """What remains to be shown about numbers of a recording; nodes of sizes and of the caller's numbers, mostly.

    Attributes:
        rounded: rounded numbers that have not changed although what was rounded has, by their places in
            `Recorder.rounded`.
        sizes: those that have changed by little or not at all.
        hidden: of these those of at most HIDDEN, which no smaller recording shows.
        stepped: those that the forward may count to in steps.
        low: those that have not been smaller.
        few: those that depend on the inputs' sizes, and have been less than ENOUGH.
    """

    rounded: frozenset[int] = frozenset()
    sizes: frozenset[int] = frozenset()
    hidden: frozenset[int] = frozenset()
    stepped: frozenset[int] = frozenset()
    low: frozenset[int] = frozenset()
    few: frozenset[int] = frozenset()

    def __and__(self, other: Unmoved) -> Unmoved:
        """What two recordings both leave to be shown."""
        return Unmoved(*(getattr(self, one.name) & getattr(other, one.name) for one in fields(self)))

    def __or__(self, other: Unmoved) -> Unmoved:
        """What remains of recordings that vary a group of sizes each, of which the others' numbers stay."""
        return Unmoved(*(getattr(self, one.name) | getattr(other, one.name) for one in fields(self)))

    def may_be_shown_by(self, step: str) -> bool:
        """Whether a recording whose sizes `step` made may show some of it."""
        return bool(
            ((self.rounded or self.sizes - self.hidden) and step != FEW)
            or (self.hidden and step in (TWICE_AND_ONE, FAR, FARTHER))
            or (self.stepped and step == FARTHER)
            or (self.low and step in SMALLEST)
            or (self.few and step in (ONE, HALF, TWICE_AND_ONE, FAR))
        )


def unmoved_numbers(one: Recorder, other: Recorder, step: str) -> Unmoved:
    """What a second recording, whose sizes `step` made, leaves to be shown about the first."""
    sizes, few = set(), set()
    depends = {index for index, tensor in one.sizes.items() if _may_depend(one, other, index, tensor)}
    for index in depends:
        mine, theirs = one.value(index), other.value(index)
        # What is the same for inputs of twice the size does not depend on it; of what may be hidden FAR decides.
        shows = step in (FAR, FARTHER) if mine <= HIDDEN and mine == theirs else step in UNCOVER
        shows &= step not in SMALLEST or mine > HIDDEN
        if not _are_far(mine, theirs) and not shows:
            sizes.add(index)
        if mine != theirs and max(mine, theirs) < ENOUGH:
            few.add(index)
    return Unmoved(
        rounded=frozenset(_alike_by_rounding(one, other)),
        sizes=frozenset(sizes),
        hidden=frozenset(index for index in sizes if one.value(index) <= HIDDEN),
        stepped=frozenset(depends if one.largest_step > 1 and step != FARTHER else ()),
        low=frozenset(index for index in depends if one.value(index) > 1 and step not in SMALLEST),
        few=frozenset(few),
    )


def _may_depend(one: Recorder, other: Recorder, index: int, tensor: int) -> bool:
    """Whether a size may be another one for other inputs; one of an input that stays is held, or the module's own."""
    return one.nodes[tensor].kind is not Kind.INPUT or bool(one.value(index) != other.value(index))


def _alike_by_rounding(one: Recorder, other: Recorder) -> set[int]:
    """The places of rounded numbers that agree in two recordings although the numbers before rounding differ.

    Where Python counts by one of them unseen, the recordings could not tell.
    """
    guarded = {node.args[0].index for node in one.nodes if node.kind is Kind.GUARD and isinstance(node.args[0], Ref)}
    places = {index: place for place, index in enumerate(one.rounded) if index not in guarded}
    moved: set[int] = set()
    alike = set()
    for node in one.nodes:
        mine, theirs = one.value(node.index), other.value(node.index)
        if isinstance(mine, (int, float)) and mine != theirs:
            moved.add(node.index)
        elif node.index in places and moved.intersection(node.refs):
            alike.add(places[node.index])
    return alike


def _are_far(one: int, other: int) -> bool:
    return one != other and 2 * max(one, other) >= 3 * min(one, other)
