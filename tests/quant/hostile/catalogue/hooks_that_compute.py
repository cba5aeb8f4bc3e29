"""Forward hooks of the user's that are part of what the model computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import WIDTH, case, images, steps


def layers(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, width))


HOOKED: dict[str, Callable[[nn.Module], Any]] = {
    "gives another output": lambda one: one.register_forward_hook(lambda module, args, output: output * 3 + 1),
    "changes the output in place": lambda one: one.register_forward_hook(
        lambda module, args, output: [None, output.mul_(3).add_(1)][0]
    ),
    "gives another input": lambda one: one.register_forward_pre_hook(lambda module, args: args[0] * 3 + 1),
    "looks": lambda one: one.register_forward_hook(lambda module, args, output: output),
}
PLACES = {"a layer": "inner.0", "an activation": "inner.1", "a block": "inner", "the last layer": "inner.4"}


def hooked(place: str, how: str) -> nn.Module:
    model = nn.Sequential()
    model.add_module("inner", layers())
    HOOKED[how](model.get_submodule(place))
    return model


for _what, _place in PLACES.items():
    for _how in HOOKED:
        case(f"a hook of {_what} that {_how}")(lambda place=_place, how=_how: hooked(place, how))


@case("hooks that take keyword arguments")
class Keywords(nn.Module):
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, 64)

        def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
            return self.fc(x) * gain

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.last = self.Gain(), nn.Linear(64, WIDTH)
        self.gain.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "gain": kwargs["gain"] * 3}), with_kwargs=True
        )
        self.gain.register_forward_hook(lambda module, args, kwargs, output: output + kwargs["gain"], with_kwargs=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gain(x, gain=2.0).relu())


@case("a hook that steers channels by a vector, and one that negates a batch norm's", images)
def steered() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    vector = torch.rand(32, 1, 1)
    model[0].register_forward_hook(lambda module, args, output: output + vector)
    model[1].register_forward_hook(lambda module, args, output: -output)
    model.append(nn.Linear(32, WIDTH))
    return model


@case("features that a method collects as a hook, by a list that the forward clears")
class Collected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = layers(), nn.Linear(128, WIDTH)
        self.features: list[Tensor] = []
        for place in (1, 3):
            self.body[place].register_forward_hook(self.collect)

    def collect(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features.append(output)

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        self.body(x)
        return self.head(torch.cat(self.features, 1))


@case("features that a function collects as a hook, by name")
class CollectedByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = layers(), nn.Linear(128, WIDTH)
        self.features: dict[int, Tensor] = {}
        for place in (1, 3):
            self.body[place].register_forward_hook(self.collector(place))

    def collector(self, place: int) -> Callable[..., None]:
        def collect(module: nn.Module, args: Any, output: Tensor) -> None:
            self.features[place] = output

        return collect

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        return self.head(torch.cat([self.features[1], self.features[3]], 1))


@case("a hook that doubles the output and counts its calls")
def counting() -> nn.Module:
    model, seen = layers(), {"calls": 0}

    def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen["calls"] += 1
        return output * 2

    model[0].register_forward_hook(double)
    return model


@case("a hook that doubles the output where its values are large")
def by_values() -> nn.Module:
    model = layers()
    model[0].register_forward_hook(lambda module, args, output: output * 2 if output.max() > 0.1 else output)
    return model


@case("a hook of a layer that is called twice")
class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.fc.register_forward_hook(lambda module, args, output: output * 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x).relu())


@case("hooks of an LSTM and of attention that change a part of the tuple", steps)
class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, 32, batch_first=True)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.last = nn.Linear(32, WIDTH)
        for layer in (self.rnn, self.attention):
            layer.register_forward_hook(lambda module, args, output: (output[0] * 2, output[1]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.rnn(x)[0]
        return self.last(self.attention(y, y, y)[0])


@case("a hook that writes into a dict that the module gives")
class Dicts(nn.Module):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, 64)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": self.fc(x)}

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = self.Inner(), nn.Linear(64, WIDTH)
        self.inner.register_forward_hook(lambda module, args, output: output.update(y=output["y"] * 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.inner(x)["y"]))


@case("hooks of modules that an island calls")
class InAnIsland(nn.Module):
    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = nn.Linear(WIDTH, WIDTH), layers()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.rest(-x if x.mean() > 1e3 else x)

    def __init__(self) -> None:
        super().__init__()
        self.island, self.last = self.Island(), nn.Linear(WIDTH, WIDTH)
        self.island.first.register_forward_hook(lambda module, args, output: output + 1)
        self.island.rest.register_forward_pre_hook(lambda module, args: args[0] * 0.5)
        self.island.rest.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.island(x).relu())


@case("a hook that is an object with a gain")
def of_an_object() -> nn.Module:
    class Gain:
        def __init__(self) -> None:
            self.gain = torch.full((1,), 2.0)

        def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * self.gain

    model = layers()
    model[0].register_forward_hook(Gain())
    return model


@case("a hook whose weight is that of another layer")
class Borrowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.register_forward_hook(lambda module, args, output: F.linear(output.relu(), self.last.weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))
