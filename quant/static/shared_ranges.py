"""Common ranges of a concatenation's inputs that have other readers too.

With one range a concatenation is a copy, and values that pass through several of them, as in ShuffleNet, are rounded
once. The cost is precision for other readers of a narrow input, whose scale grows. So ranges are joined while none
grows to more than WIDEST times its own; the others stay apart, and the copy requantises (`ops/concat.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from quant.kernels import QParams, choose_qparams
from quant.observers import NoDataSeen, Observer

WIDEST = 2.0
"""The factor by which a scale may grow: at most one bit of a value is lost."""

Ends = tuple[Tensor, Tensor]
"""(low, high) of a range, float32 () each."""


def agreed(pairs: Sequence[tuple[str, str]], observers: Mapping[str, Observer]) -> dict[str, Ends]:
    """The common ranges of joined slots, by slot; slots that stay apart are not included.

    A range that the user gave stays apart, unchanged.

    Args:
        pairs: slots of concatenations, each with one of an input of it.
        observers: the calibrated observers of all these slots.

    Raises:
        NoDataSeen: an observer saw nothing.
    """
    ends = {slot: observer.range() for slot, observer in observers.items()}
    own = {slot: width([one]) for slot, one in ends.items()}
    groups = {slot: [slot] for slot in ends}

    def growth(slots: Iterable[str]) -> float:
        together = list(dict.fromkeys(slots))
        return width([ends[slot] for slot in together]) / max(min(own[slot] for slot in together), 1e-30)

    for one, other in sorted(pairs, key=growth):
        if groups[one] is groups[other] or observers[one].scheme != observers[other].scheme:
            continue
        if observers[one].given is not None or observers[other].given is not None:
            continue
        if growth([*groups[one], *groups[other]]) <= WIDEST:
            groups[one].extend(groups[other])
            groups.update(dict.fromkeys(groups[one], groups[one]))
    together = {slot: group for slot, group in groups.items() if len(group) > 1}
    return {slot: _union([ends[one] for one in group]) for slot, group in together.items()}


def width(ranges: Sequence[Ends]) -> float:
    """The width of the smallest range with zero that contains all of these."""
    return max(0.0, *(float(high) for _, high in ranges)) - min(0.0, *(float(low) for low, _ in ranges))


def _union(ranges: Sequence[Ends]) -> Ends:
    low, high = zip(*ranges, strict=True)
    return min(low), max(high)


class Agreement:
    """`agreed`, recomputed where an observer has seen new data."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.pairs = tuple(pairs)
        self._state, self._known = b"", dict[str, Ends]()
        self._settled: bool | None = None

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """A context in which nothing is observed, so that the observers are read once."""
        before, self._settled = self._settled, self._settled or False
        try:
            yield
        finally:
            self._settled = before

    def of(self, slot: str, observer: Callable[[str], object]) -> QParams | None:
        """The range of a slot; None where it has its own.

        Args:
            observer: of each slot. Where one is no observer, as in training, or saw nothing, none agree.
        """
        if not any(slot in pair for pair in self.pairs):
            return None
        ends = self.ends(observer).get(slot)
        return None if ends is None else choose_qparams(*ends, observer(slot).scheme)  # type: ignore[attr-defined]

    def ends(self, observer: Callable[[str], object]) -> dict[str, Ends]:
        """The range of every slot that agrees with others; `observer` as in `of`."""
        if self._settled:
            return self._known
        members = {name: observer(name) for pair in self.pairs for name in pair}
        observers = {name: one for name, one in members.items() if isinstance(one, Observer)}
        if len(observers) < len(members):
            return {}
        state = _state(observers.values())
        if state != self._state:
            try:
                self._known = agreed(self.pairs, observers)
            except NoDataSeen:
                self._known = {}
            self._state = state
        self._settled = None if self._settled is None else True
        return self._known


def _state(observers: Iterable[Observer]) -> bytes:
    """A digest of the observers' data and given ranges."""
    digest = hashlib.blake2b(digest_size=16)
    for observer in observers:
        digest.update(repr(observer.given).encode())
        for buffer in observer.buffers():
            digest.update(buffer.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()
