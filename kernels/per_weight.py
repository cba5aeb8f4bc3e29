"""A cache of what a backend computes from a weight, such as its packed form, until the weight changes or dies."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from quant.kernels.at_fork import forked_lock
from torch import Tensor

T = TypeVar("T")

_State = tuple[int, int, torch.Size]


class PerWeight(Generic[T]):
    """Weight -> a value computed from it. Thread-safe, and made once in a process for each purpose.

    A write through torch changes the weight's version, and the value is computed again; kernels/README.md ("Packed
    weights") says which writes are not seen.
    """

    def __init__(self) -> None:
        # By id, dropped when the weight dies; the state says whether it was written to since.
        self._kept: dict[int, tuple[_State, T]] = {}
        self._lock = forked_lock()

    def get(self, q_weight: Tensor, make: Callable[[], T]) -> T:
        """The value that `make` computes for this weight in its present state."""
        # The address and shape too: `weight.data = other` leaves the version as it was.
        version = 0 if q_weight.is_inference() else q_weight._version
        key, state = id(q_weight), (version, q_weight.data_ptr(), q_weight.shape)
        with self._lock:
            known = self._kept.get(key)
            if known is None:
                weakref.finalize(q_weight, self._kept.pop, key, None)
            if known is None or known[0] != state:
                known = (state, make())
                self._kept[key] = known
        return known[1]

    def __len__(self) -> int:
        return len(self._kept)
