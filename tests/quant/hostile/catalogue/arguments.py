"""Arguments that come and go: optional, variable, by keyword, None, numbers, own containers, other masks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, uniform


def sometimes(batch: int, length: int, index: int) -> Inputs:
    return (uniform(batch, WIDTH),) if index % 2 else (uniform(batch, WIDTH), torch.rand(batch, 1))


@case("a mask that is there in one call and not in the next", sometimes)
class SometimesMask(TwoLayers):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.first(x).relu()
        return self.last(y if mask is None else y * mask)


@case("keyword arguments, another one at each call", lambda b, n, i: {"x": uniform(b, WIDTH), "ab"[i % 2]: 2.0})
class OtherKeyword(TwoLayers):
    def forward(self, x: Tensor, a: float = 1.0, b: float = 1.0) -> Tensor:
        return self.last(self.first(x * a).relu()) * b


@case("**kwargs of which most are ignored", lambda b, n, i: {"x": uniform(b, WIDTH), f"extra{i}": i, "labels": None})
class AnyKeyword(TwoLayers):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.last(self.first(x).relu()) + len(kwargs)


@case("*args of any number", lambda b, n, i: tuple(uniform(b, WIDTH) for _ in range(1 + i % 3)))
class AnyNumber(TwoLayers):
    def forward(self, *parts: Tensor) -> Tensor:
        return self.last(self.first(sum(parts) / len(parts)).relu())


@case("keyword-only arguments", lambda b, n, i: {"x": uniform(b, WIDTH), "gain": 0.5 + i % 2})
class KeywordOnly(TwoLayers):
    def forward(self, *, x: Tensor, gain: float) -> Tensor:
        return self.last(self.first(x).relu()) * gain


@case("positional-only arguments")
class PositionalOnly(TwoLayers):
    def forward(self, x: Tensor, /) -> Tensor:
        return self.last(self.first(x).relu())


@case("a default that is a tensor")
class DefaultTensor(TwoLayers):
    def forward(self, x: Tensor, gain: Tensor = torch.tensor(2.0)) -> Tensor:  # noqa: B008
        return self.last(self.first(x).relu()) * gain


@case("a number of steps as an argument", lambda b, n, i: (uniform(b, WIDTH), 1 + i % 3))
class StepsArgument(TwoLayers):
    def forward(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = self.last(self.first(x).relu())
        return x


@case("a flag that changes what is returned", lambda b, n, i: {"x": uniform(b, WIDTH), "hidden": bool(i % 2)})
class HiddenFlag(TwoLayers):
    def forward(self, x: Tensor, hidden: bool = False) -> Any:
        y = self.first(x).relu()
        return (self.last(y), y) if hidden else self.last(y)


@case("a temperature as a float that differs", lambda b, n, i: (uniform(b, WIDTH), 0.5 + i % 4))
class Temperature(TwoLayers):
    def forward(self, x: Tensor, temperature: float) -> Tensor:
        return (self.last(self.first(x)) / temperature).softmax(-1) * 4


@case("a temperature as a tensor without dimensions", lambda b, n, i: (uniform(b, WIDTH), torch.tensor(0.5 + i % 4)))
class TemperatureTensor(TwoLayers):
    def forward(self, x: Tensor, temperature: Tensor) -> Tensor:
        return (self.last(self.first(x)) / temperature).softmax(-1) * 4


@case("a task by its name picks a head", lambda b, n, i: (uniform(b, WIDTH), ("a", "b")[i % 2]))
class TaskByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 32)
        self.heads = nn.ModuleDict({"a": nn.Linear(32, WIDTH), "b": nn.Linear(32, 8)})

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.heads[task](self.body(x).relu())


@case("a function as an argument", lambda b, n, i: (uniform(b, WIDTH), torch.tanh if i % 2 else torch.relu))
class FunctionArgument(TwoLayers):
    def forward(self, x: Tensor, act: Any) -> Tensor:
        return self.last(act(self.first(x)))


@case("a size as an argument", lambda b, n, i: (uniform(b, 1, 4, 4), (4 + 2 * (i % 2), 6)))
class SizeArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return nn.functional.interpolate(self.conv(x).relu(), size=size, mode="nearest")


@case("a parameterless child gets a shape")
class ShapeToChild(nn.Module):
    class Positions(nn.Module):
        def forward(self, shape: tuple[int, ...], scale: float) -> Tensor:
            return torch.linspace(-1, 1, shape[0])[:, None].expand(tuple(shape)) * scale

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.layer = self.Positions(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y = y * 2 if y.sum() > 1e9 else y
        return y + self.positions(y.shape, 2.0)


@case("None for a tensor in one call of two", lambda b, n, i: (uniform(b, WIDTH), None if i % 2 else uniform(b, WIDTH)))
class NoneOrTensor(TwoLayers):
    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        y = self.first(x if context is None else x + context)
        return self.last(y.relu())


def either_mask(batch: int, length: int, index: int) -> Inputs:
    return uniform(batch, WIDTH), torch.rand(batch, 1) > 0.3 if index % 2 else torch.rand(batch, 1)


@case("a mask of booleans or of floats", either_mask)
class MaskOfEither(TwoLayers):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(torch.where(mask, y, y * 0.5) if mask.dtype == torch.bool else y * mask)


@case("a nested dict of tensors and numbers", lambda b, n, i: ({"in": {"x": uniform(b, WIDTH)}, "meta": {"id": i}},))
class NestedDict(TwoLayers):
    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["meta"]["id"], "y": self.last(self.first(batch["in"]["x"]).relu())}


@case("arguments read through inspect and locals", lambda b, n, i: (uniform(b, WIDTH), uniform(b, WIDTH)))
class Inspects(TwoLayers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        names = [name for name in inspect.signature(type(self).forward).parameters if name != "self"]
        values = locals()
        return self.last(self.first(sum(values[name] for name in names) / len(names)).relu())


@case("a shorter input at each call", lambda b, n, i: (uniform(b, 12 - 2 * (i % 3), WIDTH),))
class Shorter(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).mean(1)


@case("an input that is not contiguous", lambda b, n, i: (uniform(WIDTH, b).t(),))
class NotContiguous(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@case("an input expanded over a dimension", lambda b, n, i: (uniform(b, 1, WIDTH).expand(b, 4, -1),))
class Expanded(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@case("an input that requires a gradient", lambda b, n, i: (uniform(b, WIDTH).requires_grad_(),))
class RequiresGrad(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        return self.last(self.first(x).relu()), x.requires_grad
