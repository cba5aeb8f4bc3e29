"""Forwards that change what the module holds: attributes, lists, buffers, caches, lazily made parameters."""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, rows, steps, uniform


def stream(batch: int, length: int, index: int) -> Inputs:
    return (uniform(1, 4, 16),)


@case("a streaming convolution keeps the end of its input in a buffer", stream, other=None)
class StreamingConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 16, 3)
        self.register_buffer("context", torch.zeros(1, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.context, x], 2)
        self.context = x[:, :, -2:]
        out: Tensor = self.conv(x)
        return out


@case("a buffer is written in place", other=None, state=lambda m: m.mean)
class InPlaceBuffer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return self.last(self.first(x - self.mean).relu())


@case("an exponential average of outputs in a plain attribute", other=None)
class PlainAverage(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.average: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        now = y.detach().mean(0)
        self.average = now if self.average is None else 0.5 * self.average + 0.5 * now
        return self.last(y + self.average)


@case("a spiking neuron keeps its potential", other=None)
class Spiking(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.potential = torch.zeros(1, 32)

    def forward(self, x: Tensor) -> Tensor:
        v = 0.5 * self.potential.detach() + self.first(x)
        self.potential = torch.where(v > 5.0, torch.zeros_like(v), v)
        return self.last(torch.sigmoid(v))


@case("the last output is kept and returned at the next call", other=None)
class Delayed(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        before, self.kept = self.kept, self.last(self.first(x).relu()).detach()
        return before


@case("a counter of calls scales the output", state=lambda m: m.calls)
class Counter(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.first(x).relu()) / self.calls


@case("a counter in a buffer, as batch norm's", state=lambda m: m.calls)
class BufferCounter(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.first(x).relu())


@case("a list on the module grows with each call", other=None, state=lambda m: m.seen)
class GrowingList(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        self.seen.append(y.detach().mean(0))
        return self.last(y + torch.stack(self.seen).mean(0))


@case("the forward leaves its activations on the module", state=lambda m: (m.hidden, m.shapes))
class LeavesActivations(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.first(x).relu()
        self.shapes = {"x": tuple(x.shape), "hidden": tuple(self.hidden.shape)}
        out: Tensor = self.last(self.hidden)
        return out


@case("a child leaves a loss on itself for its parent to add")
class AuxiliaryLoss(nn.Module):
    class Child(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            self.loss = y.square().mean()
            return self.last(y)

    def __init__(self) -> None:
        super().__init__()
        self.children_ = nn.ModuleList(self.Child() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for child in self.children_:
            x = x + child(x)
        return x, torch.stack([child.loss for child in self.children_]).sum()


@case("a cache of tables keyed by shape", steps)
class CacheByShape(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[tuple[int, ...], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = tuple(x.shape[1:])
        if key not in self.tables:
            self.tables[key] = torch.linspace(-1, 1, key[0])[:, None].expand(key)
        return self.last(self.first(x + self.tables[key]).relu())


@case("a table of positions that grows when a longer input comes", steps, state=lambda m: m.table.shape)
class GrowingTable(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.size(1) > self.table.size(0):
            self.table = torch.arange(x.size(1))[:, None] / torch.arange(1, WIDTH + 1)
        return self.last(self.first(x + self.table[: x.size(1)].sin()).relu())


@case("a parameter is made at the first call", state=lambda m: m.gain is not None)
class LazyParameter(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("gain", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.gain is None:
            self.gain = nn.Parameter(torch.full((x.size(-1),), 1.5))
        return self.last(self.first(x * self.gain).relu())


@case("a buffer is made at the first call", state=lambda m: hasattr(m, "offset"))
class LazyBuffer(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "offset"):
            self.register_buffer("offset", torch.linspace(-1, 1, x.size(-1)))
        return self.last(self.first(x + self.offset).relu())


@case("a buffer is replaced by one computed from the input", other=None, state=lambda m: m.codes)
class ReplacedBuffer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self._buffers["codes"] = x.detach()[:4] * 0.5
        return self.last(self.first(x + self.codes.mean(0)).relu())


@case("a ring buffer is written at a moving place", other=None)
class RingBuffer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(4, WIDTH))
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        self.ring[self.at] = x.detach().mean(0) * 4
        self.at = (self.at + 1) % 4
        return self.last(self.first(x + self.ring.sum(0)).relu())


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
        out: Tensor = self.out(F.scaled_dot_product_attention(q, keys, values))
        return out


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
