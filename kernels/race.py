"""The clock of the autotuner: contenders are timed in turns, so that a machine that slows down slows all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Returns seconds."""

ROUNDS = 15
SAMPLE_SECONDS = 0.002
"""Approximate length of a sample, during which a candidate is called repeatedly: far above the clock's resolution."""

FIRST, HOPELESS = 3, 3.0
"""A candidate whose fastest of the first calls takes this many times the fastest of all is not measured further. One
call alone may meet another process."""

WORTH, OFTEN = 0.02, 0.8
"""One is clearly faster that is faster by the first share in the second share of rounds. The dispatcher's choice is
kept unless another backend is: a layer without a choice of its own adapts to the machine that it is loaded on."""


def race(
    contenders: Mapping[str, Callable[[], object]], clock: Clock, *, needed: Collection[str] = ()
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The times of each contender, round by round, or one for a hopeless one; and why some have none.

    Args:
        needed: whose errors are raised.
    """
    first: dict[str, float] = {}
    cannot: dict[str, str] = {}
    for name, call in contenders.items():
        try:
            call()  # packs weights
            first[name] = min(timed(call, 1, clock) for _ in range(FIRST))
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            if name in needed:
                raise
            cannot[name] = f"{type(error).__name__}: {error}"
    limit = HOPELESS * min(first.values())
    samples = {name: [spent] for name, spent in first.items() if spent > limit}
    racing = {name: max(1, round(SAMPLE_SECONDS / max(spent, 1e-9))) for name, spent in first.items() if spent <= limit}
    samples.update({name: [] for name in racing})
    order = list(racing)
    for turn in range(ROUNDS):
        # Each round starts with another, so that nobody always follows the same neighbour.
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            samples[name].append(timed(contenders[name], racing[name], clock))
    return {name: samples[name] for name in first}, cannot


def timed(call: Callable[[], object], repeats: int, clock: Clock) -> float:
    """Seconds of a call, the mean of several."""
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def clearly_faster(mine: Sequence[float], others: Sequence[float]) -> bool:
    """Whether one contender is, by the times of the same rounds."""
    wins = sum(one < (1 - WORTH) * other for one, other in zip(mine, others, strict=True))
    return wins >= OFTEN * len(mine)
