"""Few places: sizes that were one or two in calibration, lists that are shorter than a size, and a number like 0.5."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, Maker, TwoLayers, case, uniform

FRESH = {101: 5, 102: 13, 103: 2}
"""Size of some fresh inputs."""


def from_one(batch: int, length: int, index: int) -> Inputs:
    return (uniform(FRESH.get(index, 1), WIDTH),)


def from_two(batch: int, length: int, index: int) -> Inputs:
    return (uniform({101: 1}.get(index, FRESH.get(index, 2)), WIDTH),)


def from_one_step(batch: int, length: int, index: int) -> Inputs:
    return (uniform(4, FRESH.get(index, 1), WIDTH),)


def from_one_image(batch: int, length: int, index: int) -> Inputs:
    return (uniform(FRESH.get(index, 1), 3, 8, 8),)


class PicksRows(TwoLayers):
    """A layer, some rows by their places, and a layer."""

    def places(self, rows: int) -> Iterable[int]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(torch.stack([y[i] for i in self.places(x.shape[0])]))


def every_third(inputs: Maker, what: str) -> None:
    @case(f"every third place of a range, {what}", inputs)
    class EveryThird(PicksRows):
        def places(self, rows: int) -> Iterable[int]:
            return range(rows)[::3]


every_third(from_one, "calibrated on one row")
every_third(from_two, "calibrated on two rows")


@case("places divisible by four, calibrated on one row", from_one)
class DivisibleByFour(PicksRows):
    def places(self, rows: int) -> Iterable[int]:
        return [i for i in range(rows) if i % 4 == 0]


@case("places divisible by an attribute of nine, calibrated on one row", from_one)
class DivisibleByAttribute(PicksRows):
    every = 9

    def places(self, rows: int) -> Iterable[int]:
        return [i for i in range(rows) if not i % self.every]


@case("places of numpy's arange in threes, calibrated on one row", from_one)
class NumpyInThrees(PicksRows):
    def places(self, rows: int) -> Iterable[int]:
        return [int(i) for i in np.arange(0, rows, 3)]


@case("every third step, calibrated on one step", from_one_step)
class EveryThirdStep(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(torch.stack([y[:, i] for i in range(x.shape[1])[::3]], 1))


@case("images in fours, calibrated on one image", from_one_image)
class ImagesInFours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(torch.cat([y[i : i + 4].mean(0, keepdim=True) for i in range(0, x.shape[0], 4)]))


def down_to_one_step(batch: int, length: int, index: int) -> Inputs:
    return (uniform(4, {101: 2, 102: 1, 103: 41}.get(index, 15), WIDTH),)


def down_to_two_rows(batch: int, length: int, index: int) -> Inputs:
    return (uniform({101: 2, 102: 3, 103: 9}.get(index, 8), WIDTH),)


@case("a list of three that is cut to the length", down_to_one_step)
class CutsShortList(TwoLayers):
    gains = (1.0, -0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(y * sum(self.gains[: x.shape[1]]))


@case("a list of four beside a range over the rows, in zip", down_to_two_rows)
class ZipsShortList(TwoLayers):
    gains = (1.0, -0.5, 2.0, 0.75)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(torch.stack([gain * y[i] for gain, i in zip(self.gains, range(x.shape[0]), strict=False)]))


@case("a list of three that is cut to the length, behind a branch on a single step", down_to_one_step)
class CutsBehindBranch(CutsShortList):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True) if x.shape[1] > 1 else x)


def halves(batch: int, length: int, index: int) -> Inputs:
    return uniform(batch, WIDTH), {101: 1.5, 102: -0.25}.get(index, 0.5)


@case("a number of 0.5 in a function of math", halves)
class ExpOfNumber(TwoLayers):
    def forward(self, x: Tensor, temperature: float) -> Tensor:
        return self.last(self.first(x).relu()) * math.exp(temperature)
