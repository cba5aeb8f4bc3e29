"""Forwards that change what the module holds: attributes, lists, buffers, caches, lazily made parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, steps, uniform


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


def wave(batch: int, length: int, index: int) -> Inputs:
    return (uniform(batch, 4, 16 + length),)


@case("widths of a padding are buffers, as EnCodec's", wave)
class PadByBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(4, 8, 3), nn.Conv1d(8, 4, 3)
        self.register_buffer("left", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        out: Tensor = self.last(nn.functional.pad(y, (self.left, self.left + y.shape[-1] % 4)))
        return out
