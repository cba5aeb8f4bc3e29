"""Sizes on ways that Python tells nobody of, and tensors that are one and the same."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from fractions import Fraction

import torch
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, images, steps, uniform


def three_or_two(batch: int, length: int, index: int) -> Inputs:
    """Of three dimensions for calibration and of two for the last fresh inputs."""
    return (uniform(batch, WIDTH) if batch == 5 else uniform(batch, length, WIDTH),)


@case("len of the shape tells sequences from rows", three_or_two)
class Rank(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(y) * (2.0 if len(x.shape) == 3 else 0.5)


@case("the shape as a text names the output", steps)
class ShapeText(TwoLayers):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {str(x.shape): self.last(self.first(x).relu())}


@case("range counts by a quotient of the batch size")
class RangeOfQuotient(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        for _ in range(x.size(0) // 8):
            y = y * 0.5
        return self.last(y)


@case("a table is looked up by a quotient of the batch size")
class TableOfQuotient(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * [1.0, 4.0, 2.0][x.size(0) // 8]


@case("bytes of a quotient's length are unpacked")
class BytesOfQuotient(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * (1 + len(struct.pack(f"{x.size(0) // 8}s", b"")))


@case("a power modulo a number and divmod of a number by a size")
class OddArithmetic(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        quotient, rest = divmod(100, x.size(0))
        return self.last(self.first(x).relu()) * (pow(x.size(0), 2, 7) + quotient) + rest


@case("a shift by a size, a fraction of it, and its bits")
class OddNumbers(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        n = x.size(0)
        scale = (1 << n % 4) + float(Fraction(1, 3) * n) + n.real + (7 & n) + n.bit_count()
        return self.last(self.first(x).relu()) * scale


@case("the type of a size is asked for")
class TypeOfSize(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        sizes = (x.size(0),) * 2 if type(x.size(0)) is int else (1, 1)
        return self.last(self.first(x).relu()) * (1 + 8 / sum(sizes))


@case("a child asks for the type of a size")
class ChildAsksType(TwoLayers):
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if type(x.shape[-1]) is int else -x

    def __init__(self) -> None:
        super().__init__()
        self.asks = self.Asks()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.asks(self.first(x)).relu())


def other_layout(batch: int, length: int, index: int) -> Inputs:
    (x,) = images(batch, length, 0)
    return (x.contiguous(memory_format=torch.channels_last) if batch == 5 else x,)


@case("what contiguous gave is written to, and the tensor is read", other_layout)
class WritesContiguous(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = x.contiguous()
        z.mul_(2.0)
        return self.conv(x + z)


@case("a tensor given back by to() inside a child is read by the parent")
class GivenBackInside(TwoLayers):
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = x.to(torch.float32).contiguous()
            return self.layer(x)

    def __init__(self) -> None:
        super().__init__()
        self.casts = self.Casts()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(y + self.casts(y) + y.flatten(1))


@case("dropout that is off gives its input back, which is read too")
class DropoutGivesBack(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(y + nn.functional.dropout(self.drop(y), 0.5, self.training) + y)


@case("an iterator over a size's digits")
class Digits(TwoLayers):
    @staticmethod
    def digits(number: int) -> Iterator[int]:
        while number:
            number, digit = divmod(number, 10)
            yield digit

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * (1 + sum(self.digits(x.size(0))))


class SizeInText(TwoLayers):
    """`text_of` makes a text of the batch size in C; the size of the last fresh inputs has another factor."""

    five: str

    def text_of(self, rows: int) -> str:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x).relu())
        return y * 3.0 if self.text_of(x.size(0)) == self.five else y


@case("a size that % made a text of chooses a factor")
class Percent(SizeInText):
    five = "5 rows"

    def text_of(self, rows: int) -> str:
        return "%d rows" % rows  # noqa: UP031


@case("a size in hex chooses a factor")
class Hex(SizeInText):
    five = "0x5"

    def text_of(self, rows: int) -> str:
        return hex(rows)


@case("a size in JSON chooses a factor")
class Json(SizeInText):
    five = "[5]"

    def text_of(self, rows: int) -> str:
        return json.dumps([rows])
