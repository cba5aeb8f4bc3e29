"""Numbers of a recording that another one, of other sizes, has shown too little about.

A forward may use a number where nothing notes it, as in `range(n)` or `parts[:n]`. Another recording shows such a use
where the number is far from what it was. Three kinds may not be: what rounding gives is often the same for other
operands; a size behind a stride is often the same for other sizes of the inputs; and `range(0, n, 4)` counts the same
for sizes that are near each other. So recordings with further sizes follow (`variations.UNCOVER`) while there are such.
"""

from __future__ import annotations

from dataclasses import dataclass

from quant.capture.recorder import Recorder
from quant.capture.variations import FARTHER, HALF, UNCOVER
from quant.graph import Kind
from quant.runtime.trees import Ref

FEW = 2
"""A size of at most this may be the same for half of the inputs' sizes too, behind a larger stride."""


@dataclass(frozen=True)
class Unmoved:
    """What remains to be shown about numbers of a recording; false where nothing does.

    Attributes:
        rounded: rounded numbers that have not changed although what was rounded has, by their places in
            `Recorder.rounded`.
        sizes: nodes of sizes, and of the caller's numbers, that have changed by little or not at all.
    """

    rounded: frozenset[int] = frozenset()
    sizes: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.rounded or self.sizes)

    def __and__(self, other: Unmoved) -> Unmoved:
        """What two recordings both leave to be shown."""
        return Unmoved(self.rounded & other.rounded, self.sizes & other.sizes)


def unmoved_numbers(one: Recorder, other: Recorder, step: str) -> Unmoved:
    """What a second recording, whose sizes `step` made, leaves to be shown about the first."""
    return Unmoved(frozenset(_alike_by_rounding(one, other)), frozenset(_near_sizes(one, other, step)))


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


def _near_sizes(one: Recorder, other: Recorder, step: str) -> set[int]:
    """The nodes of sizes that may have been used unseen all the same."""
    if one.counts_in_steps:
        return set() if step == FARTHER else set(one.sizes)
    if step in UNCOVER and step != HALF:
        return set()  # what is the same for inputs of twice the size does not depend on it
    near = set()
    for index, tensor in one.sizes.items():
        mine, theirs = one.value(index), other.value(index)
        own = one.nodes[tensor].kind is Kind.INPUT  # a size that no other takes the place of is the module's own
        if not _are_far(mine, theirs) and not (own and mine == theirs) and (step != HALF or mine <= FEW):
            near.add(index)
    return near


def _are_far(one: int, other: int) -> bool:
    return one != other and 2 * max(one, other) >= 3 * min(one, other)
