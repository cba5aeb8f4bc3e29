"""Modules that are called in unusual ways: hooks put on inside, forwards replaced, classes called with instances."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import WIDTH, TwoLayers, case


@case("a forward hook is put on inside the forward and catches a layer's output")
class HookInside(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        caught: list[Tensor] = []
        handle = self.first.register_forward_hook(lambda module, args, output: caught.append(output))
        y = self.last(self.first(x).relu())
        handle.remove()
        return y, caught[0]


@case("a forward hook put on inside changes a layer's output")
class HookChanges(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        handle = self.first.register_forward_hook(lambda module, args, output: output * 2)
        y = self.last(self.first(x).relu())
        handle.remove()
        return y


@case("hidden states are collected by hooks that the forward puts on every layer")
class HiddenStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden: list[Tensor] = []
        handles = [layer.register_forward_hook(lambda m, a, o: hidden.append(o)) for layer in self.layers]
        for layer in self.layers:
            x = layer(x).relu()
        for handle in handles:
            handle.remove()
        return x, tuple(hidden)


@case("a forward pre-hook put on inside scales a layer's input")
class PreHookInside(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        handle = self.last.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        y = self.last(self.first(x).relu())
        handle.remove()
        return y


@case("a tensor hook doubles the gradient")
class TensorHook(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return self.last(y.relu())


@case("type(m).forward(m, x)")
class CallsClassForward(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return type(self.last).forward(self.last, type(self.first).forward(self.first, x).relu())


@case("m.forward(x) instead of m(x)")
class CallsForward(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last.forward(self.first.forward(x).relu())


@case("nn.Linear.__call__(m, x) and map over modules")
class MapsModules(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = sum(map(functools.partial(nn.Linear.__call__, self.first), [x, x * 0.5]))
        return self.last(torch.as_tensor(y).relu())


def _patched(self: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, self.weight, self.bias).relu() * 2  # type: ignore[arg-type]


@case("a layer whose forward was replaced on the instance")
def patched() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH))
    model[0].forward = types.MethodType(_patched, model[0])  # type: ignore[method-assign]
    return model


@case("a layer whose forward was replaced by functools.partial of the old one")
def partial() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    model[0].forward = functools.partial(F.linear, weight=model[0].weight, bias=model[0].bias)  # type: ignore
    return model


@case("the root's forward was replaced by a lambda")
def lambda_root() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH))
    first, last = model[0], model[1]
    model.forward = lambda x: last(first(x).relu())  # type: ignore[method-assign]
    return model


def halved(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return forward(self, *args, **kwargs) * 0.5

    return wrapper


@case("a decorated forward")
class Decorated(TwoLayers):
    @halved
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@case("a subclass of Linear whose __call__ does more")
class OwnCall(nn.Module):
    class Layer(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * 2

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = self.Layer(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@case("super().forward twice")
class TwiceSuper(nn.Module):
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x).tanh())

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = self.Layer(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@case("a class called Flatten that does something else")
class NamedFlatten(nn.Module):
    class Flatten(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flip(-1) * 2

    def __init__(self) -> None:
        super().__init__()
        self.first, self.flatten, self.last = nn.Linear(WIDTH, 32), self.Flatten(), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.flatten(self.first(x)).relu())


@case("a subclass of nn.Flatten with another forward")
class SubclassOfFlatten(nn.Module):
    class Swaps(nn.Flatten):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.transpose(1, 2))

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.flatten, self.last = nn.Conv1d(4, 8, 1), self.Swaps(), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.flatten(self.conv(x.view(-1, 4, 4))).relu())


@case("a subclass of nn.ReLU that is leaky")
class SubclassOfRelu(nn.Module):
    class Leaky(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, x, x * 0.3)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(WIDTH, 32), self.Leaky(), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


@case("a module that calls a method of a child that is not forward")
class OtherMethod(nn.Module):
    class Codec(TwoLayers):
        def encode(self, x: Tensor) -> Tensor:
            return self.first(x).relu()

        def decode(self, y: Tensor) -> Tensor:
            out: Tensor = self.last(y)
            return out

        def forward(self, x: Tensor) -> Tensor:
            return self.decode(self.encode(x))

    def __init__(self) -> None:
        super().__init__()
        self.codec = self.Codec()

    def forward(self, x: Tensor) -> Tensor:
        return self.codec.decode(self.codec.encode(x) * 2)


@case("getattr by a name made in the forward")
class ByName(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        for name in ("first", "last"):
            x = getattr(self, name)(x)
            x = getattr(torch, "tanh" if name == "first" else "relu")(x)
        return x


@case("a chain of functions composed with functools.reduce")
class Reduce(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        stages: list[Callable[[Tensor], Tensor]] = [self.first, torch.relu, lambda y: y * 0.5, self.last]
        return functools.reduce(lambda value, stage: stage(value), stages, x)


@case("functools.partial over a method")
class PartialMethod(TwoLayers):
    def scaled(self, x: Tensor, *, gain: float) -> Tensor:
        return self.first(x) * gain

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functools.partial(self.scaled, gain=2.0)(x).relu())


@case("a layer called with its input by name")
class ByKeyword(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(input=self.first(input=x).relu())


@case("apply and named_children walked inside the forward")
class WalksChildren(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        for _, child in self.named_children():
            x = child(x).relu()
        return x - sum(p.detach().abs().mean() for p in self.parameters())


@case("a forward hook of the user's on the root doubles the output")
def hooked() -> nn.Module:
    model = TwoLayersRelu()
    model.register_forward_hook(_double)
    return model


def _double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


class TwoLayersRelu(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())
