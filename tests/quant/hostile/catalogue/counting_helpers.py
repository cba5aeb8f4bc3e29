"""Functions that count to a size, for forwards of other files (`unseen_counters.py`)."""

from __future__ import annotations

FAR = 37


def is_far(k: int) -> bool:
    return k >= FAR


def picked_by_counting(n: int) -> list[int]:
    return [i for i in range(n) if i % FAR == 0 and i]


def picked_by_steps(n: int) -> list[int]:
    return _every(n, FAR)


def _every(n: int, step: int) -> list[int]:
    return list(range(0, n, step))[1:]
