"""Copies of modules made in a forward, state that lies deeper than an attribute, and modules that nobody registered."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..cases import WIDTH, TwoLayers, case


@case("a deep copy of a layer with doubled weights is called")
class DeepCopied(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        doubled = copy.deepcopy(self.first)
        doubled.weight.data.mul_(2.0)
        return self.last(doubled(x).relu())


@case("a shallow copy of a layer with another bias is called")
class ShallowCopied(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        other = copy.copy(self.first)
        other._parameters = dict(other._parameters)
        other._parameters["bias"] = nn.Parameter(torch.ones(32))
        return self.last(other(x).relu())


@case("a deep copy of a container, with an attribute set, is called")
class CopiedContainer(TwoLayers):
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gain = nn.Linear(32, 32), 1.0

        def forward(self, y: Tensor) -> Tensor:
            out: Tensor = self.layer(y) * self.gain
            return out

    def __init__(self) -> None:
        super().__init__()
        self.scales = self.Scales()

    def forward(self, x: Tensor) -> Tensor:
        other = copy.deepcopy(self.scales)
        other.gain = 3.0
        y = self.first(x).relu()
        return self.last(other(y) + self.scales(y))


@case("a count in a dict in a dict on the module", state=lambda m: m.settings)
class NestedDict(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.settings = {"inner": {"calls": 0}}

    def forward(self, x: Tensor) -> Tensor:
        self.settings["inner"]["calls"] += 1
        return self.last(self.first(x).relu()) / self.settings["inner"]["calls"]


class Inner:
    def __init__(self) -> None:
        self.calls = 0


class Outer:
    def __init__(self) -> None:
        self.inner = Inner()


@case("a count in an object in an object on the module", state=lambda m: m.outer.inner.calls)
class NestedObject(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.outer = Outer()

    def forward(self, x: Tensor) -> Tensor:
        self.outer.inner.calls += 1
        return self.last(self.first(x).relu()) / self.outer.inner.calls


@case("counts in a list of objects on the module", state=lambda m: [one.calls for one in m.counters])
class ListOfObjects(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.counters = [Inner(), Inner()]

    def forward(self, x: Tensor) -> Tensor:
        self.counters[1].calls += 1
        return self.last(self.first(x).relu()) / self.counters[1].calls


@case("a tensor in a list in a dict on the module is replaced", other=None)
class NestedTensor(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[Tensor]] = {"means": [torch.zeros(WIDTH)]}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["means"][0] = 0.5 * self.kept["means"][0] + x.detach().mean(0)
        return self.last(self.first(x + self.kept["means"][0]).relu())


@case("state in a module that is in a list", state=lambda m: m.hidden[0].calls)
class HiddenModule(TwoLayers):
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, y: Tensor) -> Tensor:
            self.calls += 1
            return y / self.calls

    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[Any] = [self.Counts()]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden[0](self.first(x).relu()))


@case("layers are called by their class, after a branch on values", refusal="every layer's class is asked for")
class ByClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = x if float(x.sum()) > 1e9 else x * 2
        for layer in self.layers:
            x = layer(x) if isinstance(layer, nn.Linear) else x.relu()
        return x


@case("a layer is called through its class's forward")
class UnboundForward(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return nn.Linear.forward(self.last, nn.Linear.forward(self.first, x).relu())


@case("a tensor attribute's data is added to", other=None)
class AddsToData(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.5).add_(x.detach().mean(0))
        return self.last(self.first(x + self.mean).relu())
