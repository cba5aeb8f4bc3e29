"""The times of single calls, contenders in turns, so that a machine that slows down slows all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quant.kernels.race import Clock

TURNS = 10
WARM_UP_CALLS, WARM_UP_SHARE = 3, 0.1
"""Calls before the first turn: at least so many, and for this share of the time that is measured."""


def timed_in_turns(
    contenders: Mapping[str, Callable[[], object]], seconds: float, clock: Clock
) -> dict[str, list[list[float]]]:
    """Seconds of each call of each contender, turn by turn.

    A turn calls one contender for a tenth of `seconds`, and once at least. Each turn begins with another contender. The
    first call of a turn finds the others' data in the caches and is not counted.
    """
    for call in contenders.values():
        _repeat(call, seconds * WARM_UP_SHARE, clock, WARM_UP_CALLS)
    samples: dict[str, list[list[float]]] = {name: [] for name in contenders}
    order = list(contenders)
    for turn in range(TURNS):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            if len(order) > 1:
                contenders[name]()
            samples[name].append(_repeat(contenders[name], seconds / TURNS, clock, 1))
    return samples


def _repeat(call: Callable[[], object], seconds: float, clock: Clock, least: int) -> list[float]:
    """The seconds of each call, for so long and at least so often."""
    taken: list[float] = []
    begin = clock()
    while len(taken) < least or clock() - begin < seconds:
        start = clock()
        call()
        taken.append(clock() - start)
    return taken
