"""Parameters that an int8 layer holds in another form, read as they are by another branch or by an island."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import BATCH, WIDTH, TwoLayers, case, images, rows


class Standardised(nn.Conv2d):
    """As `StdConv2d` of timm and BiT; a small batch takes the weight as it is."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if len(x) == BATCH:
            weight = F.batch_norm(weight.reshape(1, len(weight), -1), None, None, training=True, eps=1e-6)
            weight = weight.reshape_as(self.weight) * 0.2
        return F.conv2d(x, weight, self.bias, padding=1)


@case("a standardised convolution, and its raw weight for small batches", images)
def standardised() -> nn.Module:
    return nn.Sequential(Standardised(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1))


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.clamp(-0.1, 0.1), self.bias)


@case("a clamped weight, read raw by the module around it for small batches")
class ReadByParent(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.first = Clamped(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) if len(x) == BATCH else F.linear(x, self.first.weight)
        return self.last(y.relu())


@case("a clamped weight, read raw by the text of its name for small batches")
class ReadByName(ReadByParent):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) if len(x) == BATCH else F.linear(x, getattr(self.first, "weight"))  # noqa: B009
        return self.last(y.relu())


class Gained(nn.Module):
    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(32, WIDTH) / 4), nn.Parameter(gain)
        self.last = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * self.gain if len(x) == BATCH else self.weight
        return self.last(F.linear(x, weight).relu())


@case("a weight times a gain for each row, and without it for small batches")
def gained_by_rows() -> nn.Module:
    return Gained(torch.rand(32, 1) + 0.5)


@case("a weight times one gain, and without it for small batches")
def gained_by_one() -> nn.Module:
    return Gained(torch.tensor(1.7))


@case("a weight times a gain for each value, and without it for small batches")
def gained_by_values() -> nn.Module:
    return Gained(torch.rand(32, WIDTH) + 0.5)


@case("a low-rank update of a weight, and the weight alone for small batches")
class LowRank(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(4, WIDTH) / 4), nn.Parameter(torch.randn(32, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        if len(x) == BATCH:
            weight = weight + self.up @ self.down
        return self.last(F.linear(x, weight, self.first.bias).relu())


def normed(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.fill_(0.3)
    norm.running_var.fill_(0.1)
    return norm


class Normed(nn.Module):
    """A convolution, its batch norm, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 16, 1), normed(16), nn.ReLU())
        self.last = nn.Conv2d(16, 8, 1)


@case("a folded convolution's weight and bias, read by a function for small batches", images)
class FoldedReadRaw(Normed):
    def forward(self, x: Tensor) -> Tensor:
        conv = self.block[0]
        return self.last(self.block(x) if len(x) == BATCH else F.conv2d(x, conv.weight, conv.bias))


@case("an island reads weight and bias of a convolution whose norm is folded into it", images)
class IslandReads(Normed):
    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        if float(x.sum()) > 1e6:
            return self.last(y)
        conv = self.block[0]
        return self.last(y + F.conv2d(x, conv.weight, conv.bias))


@case("an island calls a norm that is folded into a convolution too", images)
class IslandCallsNorm(Normed):
    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        if float(x.sum()) > 1e6:
            return self.last(y)
        return self.last(y + self.block[1](y))


@case(
    "an embedding's table as the weight of a function for small batches", lambda b, n, i: (torch.randint(40, (b, n)),)
)
class TiedToTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(40, 32), nn.Linear(32, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.last(x) if len(x) == BATCH else F.linear(x, self.table.weight)


@case("weights drawn to their spectral norm in the forward", rows)
class SpectralInForward(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", F.normalize(torch.randn(32), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        weight, u = self.first.weight, self.u
        v = F.normalize(weight.t() @ u, dim=0)
        return self.last(F.linear(x, weight / torch.dot(u, weight @ v), self.first.bias).relu())
