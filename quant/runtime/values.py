"""The values of a converted program, one for each of its registers.

A value of the user's model may have two: one in float and one in uint8. Sizes that may differ between calls are
symbols.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch


@dataclass(frozen=True)
class Size:
    """A size that depends on the size of an input: factor * symbol + offset.

    Attributes:
        symbol: the name of the input's size, or of a free size, whose origin is unknown.
    """

    symbol: str
    factor: int = 1
    offset: int = 0

    def __str__(self) -> str:
        product = self.symbol if self.factor == 1 else f"{self.factor}*{self.symbol}"
        return f"{product}{self.offset:+}" if self.offset else product


Shape: TypeAlias = tuple[int | Size, ...]


def at(size: int | Size, sizes: Mapping[str, int]) -> int:
    """A size as a number, for the given symbols."""
    return size if isinstance(size, int) else size.factor * sizes[size.symbol] + size.offset


@dataclass(frozen=True)
class Value:
    """One value of a program, held by a register.

    Attributes:
        id: its place among the program's values, by which instructions name it.
        name: its name in the user's model, for errors and texts.
        dtype: None where it is not a tensor.
        shape: None where it is not a tensor.
        qparams: scale and zero point, x = scale * (q - zero_point), of integers and of tuples of them; else None.
        node: the node of the captured graph whose value it is.
    """

    id: int
    name: str
    dtype: torch.dtype | None
    shape: Shape | None
    qparams: tuple[float, int] | None
    node: int


@dataclass
class Held:
    """The values of one call of a program, by their nodes in the graph.

    Attributes:
        reals: those in float, and others that float calls return.
        integers: those in uint8.
    """

    reals: dict[int, Any] = field(default_factory=dict)
    integers: dict[int, Any] = field(default_factory=dict)

    def keep(self, value: Value, content: Any) -> None:
        """Keep the content of a register."""
        (self.reals if value.qparams is None else self.integers)[value.node] = content

    def of(self, value: Value) -> Any:
        """The content of a register."""
        return (self.reals if value.qparams is None else self.integers)[value.node]
