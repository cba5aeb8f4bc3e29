"""Loops over a size that do something at a turn far away: counters of their own, helpers, comprehensions, slices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..cases import TwoLayers, case
from . import counting_helpers
from .counting_helpers import picked_by_counting
from .hidden_sizes import odd_steps

FAR = 37
"""Beyond the sizes of calibration, and of most recordings; before the last of the fresh ones."""


class Picks(TwoLayers):
    """The first step and those that a rule picks."""

    picked: Callable[[int], list[int]]

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(torch.stack([y[:, place] for place in [0, *self.picked(y.shape[1])]], 1))


@case("a counter in steps of three, compared far away", odd_steps)
class StepsOfThree(Picks):
    def picked(self, n: int) -> list[int]:
        place, places = 0, []
        for i in range(n):
            place += 3
            if place == 3 * FAR:
                places.append(i)
        return places


@case("a counter down to nothing", odd_steps)
class CountsDown(Picks):
    def picked(self, n: int) -> list[int]:
        left, places = FAR, []
        for i in range(n):
            left -= 1
            if left == 0:
                places.append(i)
        return places


@case("a counter that is set back at a bound", odd_steps)
class SetBack(Picks):
    def picked(self, n: int) -> list[int]:
        count, places = 0, []
        for i in range(n):
            count += 1
            state = "full" if count >= FAR else "filling"
            if state == "full":
                places.append(i)
                count = 0
        return places


@case("a sum of fractions that reaches one", odd_steps)
class SumOfFractions(Picks):
    def picked(self, n: int) -> list[int]:
        time, places = 0.0, []
        for i in range(n):
            time += 1 / 32
            if time >= 1:
                places, time = [*places, i], 0.0
        return places


@case("a list that fills turn by turn", odd_steps)
class ListFills(Picks):
    def picked(self, n: int) -> list[int]:
        seen, places = [], []
        for i in range(n):
            seen.append(i)
            if len(seen) == FAR:
                places, seen = [*places, i], []
        return places


@case("how many turns a generator has", odd_steps)
class CountsGenerator(Picks):
    def picked(self, n: int) -> list[int]:
        turns = sum(1 for _ in iter(range(n)))
        return [k * FAR for k in range(turns // FAR)]


@case("a comprehension that asks a method", odd_steps)
class ComprehensionAsks(Picks):
    def is_far(self, k: int) -> bool:
        return k >= FAR

    def picked(self, n: int) -> list[int]:
        flags = [self.is_far(k) for k in range(n)]
        return [k for k, flag in enumerate(flags) if flag]


@case("the largest of a comprehension, up to a bound", odd_steps)
class LargestOf(Picks):
    def picked(self, n: int) -> list[int]:
        return [FAR] if max(min(k, FAR) for k in range(n)) == FAR else []


@case("filter by a function", odd_steps)
class Filters(Picks):
    def picked(self, n: int) -> list[int]:
        return list(filter(lambda k: k >= FAR, range(n)))


@case("any of a generator that asks a function", odd_steps)
class AnyOf(Picks):
    def picked(self, n: int) -> list[int]:
        return [FAR] if any(counting_helpers.is_far(k) for k in range(n)) else []


@case("a helper of another file that counts", odd_steps)
class HelperCounts(Picks):
    def picked(self, n: int) -> list[int]:
        return picked_by_counting(n)


@case("a helper of another file that counts in steps, by its module", odd_steps)
class HelperSteps(Picks):
    def picked(self, n: int) -> list[int]:
        return counting_helpers.picked_by_steps(n)


@case("places cut off a range by an attribute", odd_steps)
class RangeCut(Picks):
    far = FAR

    def picked(self, n: int) -> list[int]:
        return [*range(n)[self.far :]]


@case("places cut off a list of a range, by a local", odd_steps)
class ListCut(Picks):
    far = FAR

    def picked(self, n: int) -> list[int]:
        places, far = list(range(n)), self.far
        return places[far:]


@case("places cut off the end of a range by an attribute", odd_steps)
class EndCut(Picks):
    far = FAR

    def picked(self, n: int) -> list[int]:
        return [*range(n)[: -self.far]]
