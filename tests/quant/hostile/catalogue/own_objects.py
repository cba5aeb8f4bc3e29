"""Objects of the user's own classes that hold tensors: into a forward, out of it, and from module to module."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, uniform


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Slotted:
    __slots__ = ("name", "value")

    def __init__(self, value: Tensor) -> None:
        self.value, self.name = value, "slotted"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Tensor
    gain: float = 2.0


@dataclasses.dataclass
class Checked:
    value: Tensor
    total: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.total = self.value.sum(-1)


@dataclasses.dataclass(slots=True)
class SlottedData:
    value: Tensor
    parts: list[Tensor] = dataclasses.field(default_factory=list)


class Linked:
    """Two that hold each other."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.other = value, None


class ImageList:
    """What detectors hand from their transform to the rest: a padded batch and the true sizes."""

    def __init__(self, tensors: Tensor, sizes: list[tuple[int, int]]) -> None:
        self.tensors, self.sizes = tensors, sizes

    def to(self, device: torch.device) -> ImageList:
        return ImageList(self.tensors.to(device), self.sizes)


@case("returns an object of its own class")
class ReturnsBox(TwoLayers):
    def forward(self, x: Tensor) -> Box:
        return Box(self.last(self.first(x).relu()))


@case("returns an object with slots")
class ReturnsSlotted(TwoLayers):
    def forward(self, x: Tensor) -> Slotted:
        return Slotted(self.last(self.first(x).relu()))


@case("returns a SimpleNamespace")
class ReturnsNamespace(TwoLayers):
    def forward(self, x: Tensor) -> types.SimpleNamespace:
        y = self.first(x).relu()
        return types.SimpleNamespace(hidden=y, logits=self.last(y), count=2)


@case("returns a frozen dataclass")
class ReturnsFrozen(TwoLayers):
    def forward(self, x: Tensor) -> Frozen:
        return Frozen(self.last(self.first(x).relu()))


@case("returns a dataclass that computes a field in __post_init__")
class ReturnsChecked(TwoLayers):
    def forward(self, x: Tensor) -> Checked:
        return Checked(self.last(self.first(x).relu()))


@case("returns a dataclass with slots and a list in it")
class ReturnsSlottedData(TwoLayers):
    def forward(self, x: Tensor) -> SlottedData:
        y = self.first(x).relu()
        return SlottedData(self.last(y), [y, y * 2])


@case("returns objects that hold each other")
class ReturnsCycle(TwoLayers):
    def forward(self, x: Tensor) -> Linked:
        one, other = Linked(self.first(x).relu()), Linked(x * 2)
        one.value = self.last(one.value)
        one.other, other.other = other, one
        return one


@case("returns an object with a property computed from its tensor")
class ReturnsProperty(TwoLayers):
    class Pair:
        def __init__(self, value: Tensor) -> None:
            self.value = value

        @property
        def double(self) -> Tensor:
            return self.value * 2

    def forward(self, x: Tensor) -> Pair:
        return self.Pair(self.last(self.first(x).relu()))


@case("the caller reads a property of the output", read=lambda output: output.double)
class ReadsProperty(ReturnsProperty):
    pass


class _Boxes(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, 32), kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(self.layer(x).relu())


class _Unboxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, WIDTH)

    def forward(self, box: Any) -> Tensor:
        return self.layer(box.value)


@case("an own object between two modules")
def between() -> nn.Module:
    return nn.Sequential(_Boxes(Box), _Unboxes())


@case("an object with slots between two modules")
def slots_between() -> nn.Module:
    return nn.Sequential(_Boxes(Slotted), _Unboxes())


@case("a frozen dataclass between two modules")
def frozen_between() -> nn.Module:
    return nn.Sequential(_Boxes(Frozen), _Unboxes())


@case("an own object between modules, beside a branch on values")
class BetweenAndBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.boxes, self.last = _Boxes(Box), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.boxes(x).value
        return self.last(y * 2 if y.sum() > 1e9 else y)


@case("one object is changed by each module in turn")
class Blackboard(nn.Module):
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, board: Box) -> None:
            board.value = board.value + self.layer(board.value)

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(self.Adds() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        board = Box(x)
        for module in self.all:
            module(board)
        return board.value


def boxed(batch: int, length: int, index: int) -> Inputs:
    return (Box(uniform(batch, WIDTH)),)


@case("takes an own object", boxed)
class TakesBox(TwoLayers):
    def forward(self, box: Box) -> Tensor:
        return self.last(self.first(box.value).relu())


@case("takes an own object and writes its result into it", boxed)
class WritesIntoBox(TwoLayers):
    def forward(self, box: Box) -> None:
        box.value = self.last(self.first(box.value).relu())


def dataclass_rows(batch: int, length: int, index: int) -> Inputs:
    return (Frozen(uniform(batch, WIDTH), gain=0.5 + index % 2),)


@case("takes a dataclass whose number differs from call to call", dataclass_rows)
class TakesFrozen(TwoLayers):
    def forward(self, item: Frozen) -> Tensor:
        return self.last(self.first(item.value).relu()) * item.gain


@case("takes a dataclass and returns it with another field", dataclass_rows)
class ReplacesField(TwoLayers):
    def forward(self, item: Frozen) -> Frozen:
        return dataclasses.replace(item, value=self.last(self.first(item.value).relu()))


@case("a padded batch of images in an own class, with a branch on values")
class DetectorLike(nn.Module):
    class Transform(nn.Module):
        def forward(self, x: Tensor) -> ImageList:
            sizes = [(int(row.argmax()) % 3 + 4, 4) for row in x]
            return ImageList((x - x.mean(1, keepdim=True)).view(len(x), 1, 4, 4), sizes)

    def __init__(self) -> None:
        super().__init__()
        self.transform = self.Transform()
        self.body = nn.Conv2d(1, 16, 3, padding=1)
        self.head = nn.Linear(256, 8)

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        batch = self.transform(x).to(x.device)
        y = self.head(self.body(batch.tensors).relu().flatten(1))
        return [
            {"boxes": row * height, "size": torch.tensor(height)}
            for row, (height, _) in zip(y, batch.sizes, strict=True)
        ]
