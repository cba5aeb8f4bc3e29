"""State that grows or moves: rings, caches, queues, counters of places, recurrent states."""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import WIDTH, TwoLayers, case, rows, steps, uniform


@case("a ring buffer is written at a moving place", other=None)
class RingBuffer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(4, WIDTH))
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        self.ring[self.at] = x.detach().mean(0) * 4
        self.at = (self.at + 1) % 4
        return self.last(self.first(x + self.ring.sum(0) / 4).relu())


@case("a key-value cache in preallocated buffers", lambda b, n, i: (uniform(2, 1, WIDTH),), other=None)
class StaticCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("keys", torch.zeros(2, 64, WIDTH))
        self.register_buffer("values", torch.zeros(2, 64, WIDTH))
        self.length = 0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        self.keys[:, self.length : self.length + 1] = k.detach()
        self.values[:, self.length : self.length + 1] = v.detach()
        self.length += 1
        keys, values = self.keys[:, : self.length], self.values[:, : self.length]
        return x + self.out(F.scaled_dot_product_attention(q, keys, values))


@case("statistics in a dict on the module", other=None, state=lambda m: dict(m.statistics))
class StatisticsDict(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.statistics: Any = collections.Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.statistics["rows"] += len(x)
        self.statistics["positive"] += int((x > 0).sum())
        return self.last(self.first(x).relu())


@case("an own object on the module holds the state", other=None)
class StateObject(TwoLayers):
    class Memory:
        def __init__(self) -> None:
            self.value = torch.zeros(32)

        def update(self, y: Tensor) -> Tensor:
            self.value = 0.5 * self.value + y.detach().mean(0)
            return self.value

    def __init__(self) -> None:
        super().__init__()
        self.memory = self.Memory()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(y + self.memory.update(y))


@case("a deque of the last three inputs", other=None)
class LastInputs(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.window: collections.deque[Tensor] = collections.deque(maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.window.append(x.detach())
        return self.last(self.first(torch.stack(tuple(self.window)).mean(0)).relu())


@case("the forward replaces one of its own layers at the third call", state=lambda m: type(m.act).__name__)
class ReplacesLayer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.act: nn.Module = nn.ReLU()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            self.act = nn.Tanh()
        out: Tensor = self.last(self.act(self.first(x)))
        return out


@case("an attribute is deleted and made anew in each call")
class DeletesAttribute(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        self.scratch = self.first(x)
        y = self.last(self.scratch.relu())
        del self.scratch
        return y


@case("a recurrent state is kept between calls", steps, other=None)
class KeptState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(WIDTH, 32, batch_first=True), nn.Linear(32, WIDTH)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.rnn(x, self.state)
        self.state = state.detach()
        out: Tensor = self.out(y)
        return out


@case("state in a flag that flips with each call", rows)
class Flips(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.odd = False

    def forward(self, x: Tensor) -> Tensor:
        self.odd = not self.odd
        y = self.first(x)
        return self.last(y.relu() if self.odd else y.tanh())
