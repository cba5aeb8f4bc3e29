"""How modules hang together: shared, hidden in lists, made in the forward, tied, with weights that are computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..cases import WIDTH, TwoLayers, case


@case("a layer under two names")
class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = self.one

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).relu())


@case("a layer that is a child of two children")
class SharedGrandchild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH)
        self.one, self.other = nn.Sequential(layer, nn.ReLU()), nn.Sequential(nn.Tanh(), layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


@case("layers in a plain list, which no state dict has")
class PlainList(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = [nn.Linear(32, 32), nn.Linear(32, 32)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for layer in self.middle:
            y = layer(y).relu()
        return self.last(y)


@case("a layer in a dict and one in a tuple")
class PlainDict(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.held: Any = {"a": nn.Linear(32, 32), "b": (nn.Linear(32, 32),)}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.held["b"][0](self.held["a"](self.first(x)).relu()).relu())


@case("a layer hidden from registration by object.__setattr__")
class Unregistered(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "hidden", nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(self.first(x)).relu())


@case("a child that knows its parent, in a list")
class KnowsParent(nn.Module):
    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parent, self.layer = [parent], nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x) * self.parent[0].gain
            return out

    def __init__(self) -> None:
        super().__init__()
        self.gain = 2.0
        self.child = self.Child(self)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.child(x).relu())


@case("a module made inside the forward")
class MadeInside(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        act = nn.Sequential(nn.LeakyReLU(0.2), nn.LayerNorm(32))
        return self.last(act(self.first(x)))


@case("a layer with set weights made inside the forward")
class LayerMadeInside(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        layer = nn.Linear(32, 32, bias=False)
        nn.init.eye_(layer.weight)
        return self.last(layer(self.first(x)).relu())


@case("layers looped over in a ModuleDict, with one chosen by name")
class ChosenByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("a", "b", "c")})

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.layers.items():
            x = layer(x).relu() if name != "b" else x
        return self.layers["b"](x)
