"""Sizes: empty batches, dimensions of zero, sizes through math and numpy, shapes that depend on values."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, images, steps, uniform


@case("an empty batch now and then", lambda b, n, i: (uniform(0 if i == 102 else b, WIDTH),))
class EmptyBatch(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@case("an empty batch of images now and then", lambda b, n, i: (uniform(0 if i == 102 else b, 3, 8, 8),))
class EmptyImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.avg_pool2d(self.conv(x).relu(), 8).flatten(1))


@case("a selection that is empty for some inputs")
class EmptySelection(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        some = x[x[:, 0] > 0.9]
        return self.last(self.first(x).relu()) + self.last(self.first(some).relu()).sum(0)


@case("a concatenation with a tensor of size zero")
class ZeroSize(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        none = x[:, :0]
        return self.last(self.first(torch.cat([none, x, none], 1)).relu())


@case("lengths rounded up by math.ceil", steps)
class RoundedUp(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        room = math.ceil(x.size(1) / 4) * 4 - x.size(1)
        y = F.pad(self.first(x), (0, 0, 0, room))
        return self.last(y.unflatten(1, (-1, 4)).amax(2).relu())


@case("a size through np.prod and int", images)
class NumpySizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        count = int(np.prod(y.shape[2:]))
        return self.last(y.reshape(len(y), 16, count).sum(-1) / np.sqrt(count) / 4)


@case("halves by // and round and int", steps)
class Halves(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        middle, third = n // 2, round(n / 3)
        y = self.first(x)
        return self.last((y[:, :middle].sum(1) + y[:, -third:].sum(1) + y[:, int(n * 0.9)]) / 8)


@case("the square root of a size scales attention", steps)
class ScaledBySize(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        weights = (x @ x.transpose(1, 2) / math.sqrt(x.size(-1)) - math.log(x.size(1))).softmax(-1)
        return self.last((weights @ y).relu())


@case("positions made by arange of the length", steps)
class Positions(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.size(1), dtype=x.dtype, device=x.device)[:, None] / x.size(1)
        return self.last(self.first(x + place).relu())


@case("a causal mask with -inf of the length", steps)
class Causal(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        n = x.size(1)
        mask = torch.full((n, n), float("-inf")).triu(1)
        y = self.first(x)
        return self.last((x @ x.transpose(1, 2) + mask).softmax(-1) @ y)


def one_or_all(batch: int, length: int, index: int) -> Inputs:
    return uniform(1 if index % 2 else batch, WIDTH), uniform(batch, WIDTH)


@case("broadcasting that depends on whether the batch is one", one_or_all)
class Broadcasts(TwoLayers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last((self.first(x) + self.first(y)).relu())


@case("squeeze where a size may be one", lambda b, n, i: (uniform(b, 1 + i % 2, WIDTH),))
class Squeezes(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).squeeze(1).relu())


@case("unpacking the shape", steps)
class UnpacksShape(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        *_, last = x.size()
        y = self.first(x.reshape(b * n, c)).view(b, n, -1)
        return self.last(y.relu()).reshape(b, n * last)


@case("expand, repeat and tile by sizes", steps)
class Repeats(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        return self.last(self.first(x + mean.expand(-1, x.shape[1], -1) - mean.repeat(1, len(x[0]), 1) * 0.5).relu())


@case("the number of rows is added to the output")
class AddsCount(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) + len(x) * 0.1 + x.numel() / 100


@case("the number of positive values scales the output")
class PositiveCount(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * ((x > 0).sum() / x.numel())


@case("torch.Size arithmetic makes a new shape", steps)
class SizeArithmetic(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[:-1] + (2, -1)  # noqa: RUF005 (torch.Size adds too)
        return self.last(self.first(x).view(shape).sum(-2).repeat(1, 1, 2).relu())


@case("windows of a fixed size, with a remainder", steps)
class Windows(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        pieces = x.split(4, dim=1)
        return torch.cat([self.last(self.first(piece).relu()).mean(1, keepdim=True) for piece in pieces], 1)


@case("tensor_split and chunk into as many as the length says", steps)
class AsManyChunks(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        parts = torch.tensor_split(self.first(x), x.size(1) // 3, dim=1)
        return self.last(torch.stack([part.mean(1) for part in parts], 1).relu())


@case("a guard that raises for a size, caught by the caller", lambda b, n, i: (uniform(b, WIDTH),))
class GuardsSize(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        if x.size(0) % 16:
            raise ValueError(f"a batch of {x.size(0)} is not taken")
        return self.last(self.first(x).relu())


@case("one fixed batch size written into the forward", other=None)
class FixedBatch(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.view(16, WIDTH)).relu().reshape(4, 4, 32).sum(1))


@case("chunk, one half read in float and one by a layer")
class ChunkBothWays(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        p, r = self.first(x).chunk(2, 1)
        return torch.sin(p) + self.other(r)


@case("unbind and split, read in float and by layers", steps)
class SplitBothWays(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        one, other = self.first(x).split([16, 16], -1)
        q, k = self.first(x).unflatten(-1, (2, 16)).unbind(-2)
        return self.last(torch.cat([one.sin(), other], -1)) + torch.exp(-q.abs()) + self.last(torch.cat([k, k], -1))
