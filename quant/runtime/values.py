"""The values of a converted program: what stands in each of its registers.

A value of the user's model may have two of them, one in float and one in uint8. Sizes that another call may have
otherwise are symbols.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch


@dataclass(frozen=True)
class Size:
    """A size that follows from one of an input: factor * symbol + offset.

    Attributes:
        symbol: name of the input's size, or of a size of its own whose origin is not known.
    """

    symbol: str
    factor: int = 1
    offset: int = 0

    def __str__(self) -> str:
        product = self.symbol if self.factor == 1 else f"{self.factor}*{self.symbol}"
        return f"{product}{self.offset:+}" if self.offset else product


Shape: TypeAlias = tuple[int | Size, ...]


def at(size: int | Size, sizes: Mapping[str, int]) -> int:
    """The number that a size is where the symbols have these."""
    return size if isinstance(size, int) else size.factor * sizes[size.symbol] + size.offset


@dataclass(frozen=True)
class Value:
    """One register of a program.

    Attributes:
        id: its place among the program's values, by which instructions name it.
        name: of what gives it in the user's model, for people.
        dtype: None where it is no tensor.
        shape: None where it is no tensor.
        qparams: scale and zero point, x = scale * (q - zero_point), of integers and of tuples of such; else None.
        node: the value of the captured graph that it holds.
    """

    id: int
    name: str
    dtype: torch.dtype | None
    shape: Shape | None
    qparams: tuple[float, int] | None
    node: int


@dataclass
class Held:
    """The values of the user's model as one call of its program had them, by their nodes in the graph.

    Attributes:
        reals: in float, or whatever the user's own calls give.
        integers: in uint8.
    """

    reals: dict[int, Any] = field(default_factory=dict)
    integers: dict[int, Any] = field(default_factory=dict)

    def keep(self, value: Value, content: Any) -> None:
        """Note what a register holds."""
        (self.reals if value.qparams is None else self.integers)[value.node] = content

    def of(self, value: Value) -> Any:
        """What a register holds."""
        return (self.reals if value.qparams is None else self.integers)[value.node]
