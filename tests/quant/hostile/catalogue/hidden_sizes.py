"""Sizes that are the same for other inputs: behind strides, rounding, clamps and steps, counted where nobody sees."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, uniform

FRESH = {101: 11, 102: 22, 103: 41}
"""Size of some fresh inputs, on both sides of that of calibration; all others have 15."""


def size_of(index: int) -> int:
    return FRESH.get(index, 15)


def odd_images(batch: int, length: int, index: int) -> Inputs:
    return (uniform(2, 3, size_of(index), size_of(index)),)


def odd_signals(batch: int, length: int, index: int) -> Inputs:
    return (uniform(4, 3, size_of(index)),)


def odd_steps(batch: int, length: int, index: int) -> Inputs:
    return (uniform(4, size_of(index), WIDTH),)


def odd_steps_first(batch: int, length: int, index: int) -> Inputs:
    return (uniform(size_of(index), 4, WIDTH),)


def odd_rows(batch: int, length: int, index: int) -> Inputs:
    return (uniform(size_of(index), WIDTH),)


class OverColumns(nn.Module):
    """A convolution, something that makes the image smaller, a loop over its columns, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 1)

    def smaller(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self.smaller(self.conv(x).relu())
        return self.last(torch.stack([y[:, :, :, i] for i in range(y.shape[3])], 3))


@case("a loop over the columns behind a stride", odd_images)
class BehindStride(OverColumns):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, stride=2, padding=1)

    def smaller(self, x: Tensor) -> Tensor:
        return x


@case("a loop over the columns behind a stride of 8 and its upsampling", odd_images)
class BehindUpsampling(OverColumns):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 8, stride=8, padding=4)

    def smaller(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=8.0)


@case("a loop over the columns behind a pool rounded up", odd_images)
class BehindPool(OverColumns):
    def smaller(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 4, ceil_mode=True)


@case("a loop over the columns of every third one", odd_images)
class BehindSlice(OverColumns):
    def smaller(self, x: Tensor) -> Tensor:
        return x[:, :, ::3, ::3]


@case("a loop over the columns of unfolded windows", odd_images)
class BehindUnfold(OverColumns):
    def smaller(self, x: Tensor) -> Tensor:
        return x.unfold(3, 4, 4).mean(-1)


@case("a loop over the patches of F.unfold", odd_images)
class OverPatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 4, stride=4)
        return self.last(torch.stack([self.first(patches[:, :, i]) for i in range(patches.shape[2])], 1).relu())


@case("a list cut to the number of columns behind a stride", odd_images)
class CutsList(OverColumns):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.gains = [1 + place / 8 for place in range(32)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        return self.last(y * torch.tensor(self.gains[: y.shape[3]]))


@case("a loop over the steps behind a strided convolution", odd_signals)
class OverSignal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv1d(3, 32, 3, stride=4, padding=1), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        state = torch.zeros(len(x), 32)
        for i in range(y.shape[2]):
            state = torch.tanh(y[:, :, i] + 0.5 * state)
        return self.last(state)


@case("a mean over windows of a stride, by a count that is read too", odd_signals)
class CountsAndReads(OverSignal):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        n = y.shape[2]
        total = y[:, :, 0]
        for i in range(1, n):
            total = total + y[:, :, i]
        return self.last(total / n)


@case("windows of four by range with a step", odd_steps)
class RangeWithStep(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(torch.stack([y[:, i : i + 4].mean(1) for i in range(0, x.shape[1], 4)], 1))


@case("every other step of a sequence whose time comes first", odd_steps_first)
class TimeFirst(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x[::2])
        state = torch.zeros(x.shape[1], 32)
        for i in range(y.shape[0]):
            state = torch.tanh(y[i] + 0.5 * state)
        return self.last(state)


@case("a loop over halves rounded up by math.ceil", odd_steps)
class CeilOfHalf(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(torch.stack([y[:, 2 * i] for i in range(math.ceil(x.shape[1] / 2))], 1))


@case("a loop over halves rounded up by np.ceil", odd_steps)
class NumpyCeil(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(torch.stack([y[:, 2 * i] for i in range(int(np.ceil(x.shape[1] / 2)))], 1))


@case("the logarithm of the length, rounded down by numpy, counts layers", odd_steps)
class NumpyLogarithm(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for _ in range(int(np.log2(x.shape[1]))):
            y = self.middle(y.relu())
        return self.last(y)


@case("pairs of steps, padded to an even length and reshaped with -1", odd_steps)
class PairsOfSteps(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 2:
            x = F.pad(x, (0, 0, 0, 1))
        y = self.first(x).relu().reshape(x.shape[0], -1, 2, 32)
        return self.last(torch.stack([y[:, i].amax(1) for i in range(y.shape[1])], 1))


@case("an image padded to a multiple of four, and cropped again", odd_images)
class PadsToFour(OverColumns):
    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        y = F.pad(x, (0, -width % 4, 0, -height % 4))
        y = F.interpolate(F.avg_pool2d(self.conv(y).relu(), 4), scale_factor=4.0)
        return self.last(y[:, :, :height, :width])


@case("a length clamped by min looks up relative positions", odd_steps)
class ClampedPositions(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 20))

    def forward(self, x: Tensor) -> Tensor:
        n = min(x.shape[1], 20)
        y = self.first(x).relu()
        return self.last(y[:, -n:] * self.table[:n, None])


@case("a length clamped by max counts layers", odd_steps)
class ClampedCount(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for _ in range(max(1, (x.shape[1] - 16) // 8)):
            y = self.middle(y.relu())
        return self.last(y)


@case("a length clamped by numpy scales the output", odd_steps)
class NumpyClamp(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * float(np.maximum(x.shape[1], 33))


@case("a length in an array of numpy, clipped, scales the output", odd_steps)
class NumpyArray(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * float(np.asarray(x.shape[1]).clip(33, 50))


@case("a branch on a length above a constant", odd_steps)
class AboveConstant(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(y * 0.5 if x.shape[1] > 32 else y)


@case("a branch on a length behind a stride", odd_images)
class BranchBehindStride(OverColumns):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()[:, :, ::4, ::4]
        return self.last(y * 0.25 if y.shape[3] > 4 else y)


@case("a generator cut by islice to a size behind a stride", odd_images)
class CutGenerator(OverColumns):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()[:, :, ::4, ::4]
        columns = (y[:, :, :, i] for i in range(100))
        return self.last(torch.stack(list(islice(columns, int(y.size(3)))), 3))


@case("rows of the batch in twos, counted by range")
class RowsInTwos(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(torch.cat([y[i : i + 2].mean(0, keepdim=True) for i in range(0, x.shape[0], 2)]))


@case("an odd batch in twos, counted by range", odd_rows)
class OddRowsInTwos(RowsInTwos):
    pass


@case("a number of the caller's counts every second row", lambda b, n, i: (uniform(24, WIDTH), size_of(i)))
class CallersCount(TwoLayers):
    def forward(self, x: Tensor, count: int) -> Tensor:
        y = self.first(x).relu()
        return self.last(torch.stack([y[i] for i in range(0, min(count, 24), 2)]))


def few_steps(batch: int, length: int, index: int) -> Inputs:
    return (uniform(4, {101: 3, 102: 13, 103: 41}.get(index, 5), WIDTH),)


@case("windows of twelve by range with a step, which is an attribute", few_steps)
class WideWindows(TwoLayers):
    window = 12

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        parts = [y[:, i : i + self.window].mean(1) for i in range(0, x.shape[1], self.window)]
        return self.last(torch.stack(parts, 1))


@case("windows of a computed length by range with a step", few_steps)
class ComputedWindows(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y, window = self.first(x).relu(), self.last.in_features // 3
        return self.last(torch.stack([y[:, i : i + window].mean(1) for i in range(0, x.shape[1], window)], 1))


@case("a loop over the steps behind a branch on whether their number is even", odd_steps)
class LoopBehindParity(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x[:, ::2])
        if y.shape[1] % 2:
            y = F.pad(y, (0, 0, 0, 1))
        y = y.relu()[:, ::4]
        return self.last(torch.stack([y[:, i] for i in range(y.shape[1])], 1))


@case("a loop over the steps behind a branch on their number modulo three", odd_steps)
class LoopBehindThirds(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if x.shape[1] % 3 == 0:
            y = y * 0.5
        y = y.relu()[:, ::4]
        return self.last(torch.stack([y[:, i] for i in range(y.shape[1])], 1))


def as_many_steps_as_features(batch: int, length: int, index: int) -> Inputs:
    return (uniform(4, {101: 9, 102: 17, 103: 30}.get(index, WIDTH), WIDTH),)


@case("a loop over as many steps as there are features", as_many_steps_as_features)
class AsManySteps(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(torch.stack([y[:, i].relu() for i in range(x.shape[1])], 1).cumsum(1) / 8)
