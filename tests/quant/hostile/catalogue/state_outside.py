"""State that no module holds: globals, closures, class attributes, caches of functions, context variables."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..cases import WIDTH, TwoLayers, case, steps, uniform

GLOBAL: dict[str, Any] = {"gain": 1.0, "last": None}
HISTORY: list[Tensor] = []
CALLS: list[int] = []
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("gain", default=1.0)
LOCAL = threading.local()


def clear() -> None:
    GLOBAL.update(gain=1.0, last=None)
    HISTORY.clear()
    CALLS.clear()
    SharedCounter.calls = 0
    SharedTensor.mean = torch.zeros(WIDTH)
    LOCAL.__dict__.clear()


class SharedCounter(TwoLayers):
    calls: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.last(self.first(x).relu()) / type(self).calls


class SharedTensor(TwoLayers):
    mean: ClassVar[Tensor] = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        SharedTensor.mean = 0.5 * SharedTensor.mean + x.detach().mean(0)
        return self.last(self.first(x + SharedTensor.mean).relu())


# Calibration leaves globals as a float run would; each sequence begins after `reset`.
case("a class attribute counts calls", reset=clear)(SharedCounter)
case("a class attribute holds a running mean", reset=clear)(SharedTensor)


@case("a global number doubles with each call", reset=clear)
class GlobalNumber(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        GLOBAL["gain"] = GLOBAL["gain"] * 2 if GLOBAL["gain"] < 4 else 1.0
        return self.last(self.first(x).relu()) * GLOBAL["gain"]


@case("a global keeps the last activation", other=None, reset=clear)
class GlobalTensor(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        before, GLOBAL["last"] = GLOBAL["last"], y.detach()
        return self.last(y if before is None else y + before)


@case("a global list grows", other=None, reset=clear)
class GlobalList(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        HISTORY.append(x.detach().mean(0))
        return self.last(self.first(x + torch.stack(HISTORY).mean(0)).relu())


@case("what passes between two children goes through a global", reset=clear)
class ThroughGlobal(nn.Module):
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 32)

        def forward(self, x: Tensor) -> None:
            GLOBAL["last"] = self.layer(x).relu()

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, WIDTH)

        def forward(self) -> Tensor:
            out: Tensor = self.layer(GLOBAL["last"])
            return out

    def __init__(self) -> None:
        super().__init__()
        self.writes, self.reads = self.Writes(), self.Reads()

    def forward(self, x: Tensor) -> Tensor:
        self.writes(x)
        out: Tensor = self.reads()
        return out


@case("a closure counts calls", reset=clear)
class ClosureCounter(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        calls = CALLS  # a copy of the module shares what a closure holds

        def scale(y: Tensor) -> Tensor:
            calls.append(len(calls))
            return y * (1 + len(calls) % 2)

        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale(self.first(x).relu()))


@functools.lru_cache(maxsize=8)
def table(length: int) -> Tensor:
    return torch.linspace(-1, 1, length)[:, None]


@functools.lru_cache(maxsize=8)
def mixed(length: int, gain: float) -> Tensor:
    return torch.arange(length)[:, None] * gain


@case("a table from a function with lru_cache", steps)
class LruCache(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x + table(x.size(1))).relu())


@case("lru_cache keyed by a value of the input", steps)
class LruCacheOfValue(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        gain = round(float(x.abs().max()), 1)
        return self.last(self.first(x + mixed(x.size(1), gain) * 0.1).relu())


@case("lru_cache on the tensor itself")
class LruCacheOfTensor(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        @functools.lru_cache
        def doubled(t: Tensor) -> Tensor:
            return t * 2

        y = self.first(x)
        return self.last(doubled(y) + doubled(y).relu())


@case("cached_property makes a table once")
class CachedProperty(TwoLayers):
    @functools.cached_property
    def scales(self) -> Tensor:
        return torch.linspace(0.5, 1.5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x * self.scales).relu())


@contextlib.contextmanager
def gain(value: float) -> Iterator[None]:
    token = CONTEXT.set(value)
    try:
        yield
    finally:
        CONTEXT.reset(token)


class Gained(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * CONTEXT.get()


@case("a context variable set by the parent and read by its children")
class ContextVariable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Gained(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with gain(2.0):
            y = self.first(x)
        return self.last(y.relu() + self.first(x))


@case("a thread-local passes a mask to a child", reset=clear)
class ThreadLocal(nn.Module):
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * LOCAL.mask)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = self.Masked(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        LOCAL.mask = (x > 0).float()
        return self.last(self.first(x).relu())


def memoised(function: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Give out again what was computed for the same object: right while the object lives."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def wrapper(self: nn.Module, x: Tensor) -> Tensor:
        if id(x) not in kept or kept[id(x)][0] is not x:
            kept[id(x)] = (x, function(self, x))
        return kept[id(x)][1]

    return wrapper


@case("activations kept by the identity of their inputs")
class MemoisedById(TwoLayers):
    @memoised
    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x).relu()
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x) + self.features(x) * 0.5)


@case("a list that is passed along collects activations", other=None)
class Collects(TwoLayers):
    def collect(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        return torch.stack(seen).mean(0)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        self.collect(x, seen)
        return self.last(self.first(self.collect(x * 0.5, seen)).relu())


@case("a generator on the module gives the next gain", lambda b, n, i: (uniform(b, WIDTH),))
class IteratorState(TwoLayers):
    """The iterator is an object that deepcopy can copy."""

    class Gains:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> IteratorState.Gains:
            return self

        def __next__(self) -> float:
            self.at += 1
            return 1.0 + self.at % 3

    def __init__(self) -> None:
        super().__init__()
        self.gains = self.Gains()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * next(self.gains)
