"""What a value of an ONNX file is while the file becomes a plan.

A file with QuantizeLinear and DequantizeLinear says what is rounded, and where; a runtime joins the operators between
into integer kernels. So a value stays what it was made of until somebody rounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
"""Of float32, element by element."""


@dataclass(frozen=True)
class Range:
    """Scale and zero point of a uint8 value."""

    scale: float
    zero_point: int


@dataclass(frozen=True)
class ChannelRange:
    """A scale for each channel, and one zero point: of the input of a depthwise convolution."""

    scale: tuple[float, ...]
    zero_point: int


UNKNOWN = Range(0.0, 0)
"""The range of a table's integers, of which only the DequantizeLinear behind it knows."""


@dataclass(frozen=True)
class Real:
    """A float32 register."""

    register: int


@dataclass(frozen=True)
class Held:
    """A register of another dtype: whole numbers, truth values, or floats of another width."""

    register: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Integers:
    """A uint8 register with its range; its int8 form in the file (`signed`) is 128 less."""

    register: int
    range: Range
    signed: bool = False


@dataclass(frozen=True)
class ChannelIntegers:
    """A uint8 register with a range for each channel; `real` for the reals that they stand for."""

    register: int
    range: ChannelRange
    real: bool = False


@dataclass(frozen=True)
class Dequantized:
    """The reals that integers stand for, with a function of each applied."""

    integers: Integers
    function: Function | None = None

    def then(self, function: Function) -> Dequantized:
        """One more function of the result."""
        first = self.function
        return replace(self, function=function if first is None else lambda x: function(first(x)))

    def table(self, rounded: Range) -> Tensor:
        """uint8 (256,): for each integer that of the result in another range, in float32 as a runtime computes it."""
        own = self.integers.range
        reals = (torch.arange(256, dtype=torch.float32) - own.zero_point) * torch.tensor(own.scale)
        reals = reals if self.function is None else self.function(reals)
        return torch.round(reals / torch.tensor(rounded.scale)).add(rounded.zero_point).clamp(0, 255).to(torch.uint8)


@dataclass(frozen=True)
class Weight:
    """A constant of integers with its scale.

    Attributes:
        values: int8, or int32 of a bias.
        scale: float32, () or (channels,) along `axis`.
        zero_point: int32, shaped as the scale; all 0 where layers are to compute with the integers.
    """

    values: Tensor
    scale: Tensor
    zero_point: Tensor
    axis: int

    @property
    def symmetric(self) -> bool:
        """Whether all zero points are 0."""
        return not bool(self.zero_point.any())

    def reals(self) -> Tensor:
        """What the integers stand for, float32."""
        shape = [1] * self.values.dim()
        if self.scale.numel() > 1:
            shape[self.axis] = -1
        centred = self.values.to(torch.int32) - self.zero_point.reshape(shape)
        return centred.to(torch.float32) * self.scale.reshape(shape)


Finish = Callable[["Range | ChannelRange | None", float, float], int]
"""Emits the lines that compute a value, rounded to a range and clamped, or as float32 for None; gives the register."""


@dataclass(frozen=True)
class Waiting:
    """A product, a sum or a mean that nobody has rounded yet.

    Attributes:
        finish: emits it.
        low, high: the interval that activations after it clamp it to.
        moves: operations of plans that reshape the result.
        node: its name in the file.
        by_channel: whether it can be rounded to a range for each channel.
        with_bias: the same with a constant added to each of the last dimension's values, where a layer can do that.
    """

    finish: Finish
    low: float = -float("inf")
    high: float = float("inf")
    moves: tuple[tuple[str, tuple[tuple[str, object], ...]], ...] = ()
    node: str = ""
    by_channel: bool = False
    with_bias: Callable[[Tensor], Waiting | None] | None = None

    def clamped(self, low: float, high: float) -> Waiting:
        """With a further clamp."""
        return replace(self, low=max(self.low, low), high=min(self.high, high), with_bias=None)


@dataclass(frozen=True)
class Sizes:
    """Whole numbers that follow from shapes: ints, sizes of registers, and arithmetic of them.

    Attributes:
        scalar: whether it is one number without a dimension.
    """

    numbers: tuple[object, ...]
    scalar: bool = False


@dataclass(frozen=True)
class ShapeOf:
    """The shape of a register from dimension `start` on, up to `end`."""

    register: int
    start: int
    end: int | None


@dataclass(frozen=True)
class Index:
    """Integers as the index of a table; with `starts` (broadcast to them) added."""

    integers: Integers
    starts: Tensor | None = None


Value = Real | Held | Integers | ChannelIntegers | Dequantized | Weight | Waiting | Sizes | ShapeOf | Index
