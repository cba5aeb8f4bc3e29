"""Objects of classes that do something when they are looked at: enums, generics, duck types, lazy values."""

from __future__ import annotations

import collections
import enum
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..cases import TwoLayers, case, signed_rows


class Phase(enum.Enum):
    WARM = 1
    COLD = 2


@case("returns an enum chosen by values", signed_rows)
class ReturnsEnum(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, Phase]:
        return self.last(self.first(x)), Phase.WARM if x.mean() > 0 else Phase.COLD


T = TypeVar("T")


class Generic1(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


@case("returns an object of a generic class")
class ReturnsGeneric(TwoLayers):
    def forward(self, x: Tensor) -> Generic1[Tensor]:
        return Generic1[Tensor](self.last(self.first(x).relu()))


class Frame:
    """Pretends to be a tensor by its attributes."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "data":
            raise AttributeError(name)
        return getattr(self.data, name)

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*[a.data if isinstance(a, Frame) else a for a in args], **(kwargs or {}))


@case("an own object that stands for a tensor by __torch_function__")
class DuckTensor(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(Frame(self.first(x))))  # type: ignore[arg-type]


class Lazy:
    """Computes when it is asked."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        self.layer, self.x = layer, x

    @property
    def value(self) -> Tensor:
        out: Tensor = self.layer(self.x)
        return out


@case("an object calls a layer when a property is read")
class LazyObject(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(Lazy(self.first, x).value.relu())


@case("an own iterable of tensors")
class OwnIterable(TwoLayers):
    class Pieces:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def __iter__(self) -> Iterator[Tensor]:
            yield from self.x.split(4, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(torch.cat([piece.flip(1) for piece in self.Pieces(x)], 1)))


@case("tensors behind weak references")
class Weak(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        table = weakref.WeakValueDictionary({"y": y})
        return self.last(table["y"].relu())


@case("a deque of activations")
class Deque(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        queue: collections.deque[Tensor] = collections.deque(maxlen=2)
        for gain in (1.0, 2.0, 3.0):
            queue.append(self.first(x * gain))
        return self.last(queue[0] + queue[1])
