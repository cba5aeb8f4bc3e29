"""What Python lets a forward do beside its code: frames, finalizers, exceptions with values, classes that change."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import WIDTH, TwoLayers, case, signed_rows


class Carried(Exception):
    """Brings an activation to whoever catches it."""

    def __init__(self, value: Tensor) -> None:
        super().__init__("found")
        self.value = value


class Raises(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        raise Carried(self.first(x).relu())


@case("an exception carries an activation from a child to its parent")
class Catches(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.child = Raises()

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.child(x)
        except Carried as carried:
            return self.last(carried.value)
        raise AssertionError


@case("the value that a generator returns is an activation")
class GeneratorReturns(TwoLayers):
    def parts(self, x: Tensor) -> Iterator[Tensor]:
        yield from x.unbind(1)
        return self.first(x).relu()  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        running, total = self.parts(x), x[:, 0] * 0
        while True:
            try:
                total = total + next(running)
            except StopIteration as end:
                return self.last(end.value + total[:, None] / WIDTH)


class ReadsFrame(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        frame = sys._getframe()
        while frame is not None and "secret_gate" not in frame.f_locals:
            frame = frame.f_back  # type: ignore[assignment]
        return y * frame.f_locals["secret_gate"]


@case("a child reads a variable of its parent's frame")
class HasFrame(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.child = ReadsFrame()

    def forward(self, x: Tensor) -> Tensor:
        secret_gate = x.mean(1, keepdim=True) + 1
        return self.last(self.child(self.first(x).relu())) + 0 * secret_gate


class Counts:
    """Counts its ends."""

    ended = 0

    def __del__(self) -> None:
        type(self).ended += 1


def none_ended() -> None:
    gc.collect()
    Counts.ended = 0


@case("a destructor counts the calls that came before", reset=none_ended)
class Destructor(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        gain = 1 + Counts.ended % 3
        Counts()
        return self.last(self.first(x).relu()) * gain


@case("a finalizer of an activation writes on the module", state=lambda model: model.ended)
class Finalizer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.ended = 0

    def end(self) -> None:
        self.ended += 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu() * (1 + self.ended % 3)
        weakref.finalize(y, self.end)
        z = self.last(y.detach())
        del y
        return z


@case("torch's relu is patched while a child runs")
class Patches(TwoLayers):
    class Child(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.relu(self.first(x)))

    def __init__(self) -> None:
        super().__init__()
        self.child = self.Child()

    def forward(self, x: Tensor) -> Tensor:
        with mock.patch.object(F, "relu", F.leaky_relu):
            y = self.child(x)
        return self.child(x) + y * 0.5


@case("a method is added to tensors inside")
class AddsMethod(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        Tensor.halved = lambda y: y.relu() * 0.5  # type: ignore[attr-defined]
        try:
            return self.last(self.first(x).halved())
        finally:
            del Tensor.halved  # type: ignore[attr-defined]


@case("an attribute of a child is doubled while it runs")
class Doubles(TwoLayers):
    class Child(TwoLayers):
        gain = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu()) * self.gain

    def __init__(self) -> None:
        super().__init__()
        self.child = self.Child()

    @contextlib.contextmanager
    def doubled(self) -> Iterator[None]:
        self.child.gain = 2.0
        try:
            yield
        finally:
            del self.child.gain

    def forward(self, x: Tensor) -> Tensor:
        with self.doubled():
            y = self.child(x)
        return y - self.child(x) * 0.25


@case("layers run in a copy of the context")
class CopiedContext(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = contextvars.copy_context().run(self.first, x)
        return contextvars.copy_context().run(lambda: self.last(y.relu()))


@case("a thread of its own sets an event when its part is done")
class OwnThread(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        done, found = threading.Event(), dict[str, Any]()

        def work() -> None:
            try:
                with torch.set_grad_enabled(grad):
                    found["y"] = self.first(x).relu()
            except RuntimeError as error:
                found["error"] = error
            done.set()

        grad = torch.is_grad_enabled()
        thread = threading.Thread(target=work)
        thread.start()
        done.wait()
        thread.join()
        if "error" in found:
            raise found["error"]
        return self.last(found["y"])


class Warm(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        self.__class__ = Cold
        return self.last(self.first(x).relu())


class Cold(Warm):
    def forward(self, x: Tensor) -> Tensor:
        self.__class__ = Warm
        return self.last(self.first(x).relu()) * 0.5


@case("a child changes its class at each call")
class ChangesClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Warm()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


@case("__getattribute__ counts how often a layer is asked for", state=lambda model: model.__dict__["asked"])
class CountsReads(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["asked"] = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "shrink":
            self.__dict__["asked"] += 1
            return 1 / (1 + self.__dict__["asked"] % 3)
        return super().__getattribute__(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * self.shrink


@case("__setattr__ keeps half of what is set", state=lambda model: model.kept)
class HalfSetter(TwoLayers):
    kept: Any

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(())

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value * 0.5 if name == "kept" else value)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x).relu())
        self.kept = self.kept + x.detach().mean()
        return y * (1 + self.kept)


@case("a module that is indexed, iterated and measured")
class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)])

    def __getitem__(self, place: int) -> nn.Module:
        return self.parts[place]

    def __len__(self) -> int:
        return len(self.parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self:  # type: ignore[attr-defined]
            x = part(x)
        return x / len(self)


@case("children are rotated at each call", state=lambda model: [one.out_features for one in model.heads])
class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 32)
        self.heads = nn.ModuleList([nn.Linear(32, WIDTH), nn.Linear(32, WIDTH), nn.Linear(32, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.heads
        self.heads = nn.ModuleList([*others, first])
        return first(self.first(x).relu())


@case("forward is a property that gives a function", refusal="its arguments cannot be known before it is asked for")
class PropertyForward(TwoLayers):
    @property
    def forward(self) -> Callable[[Tensor], Tensor]:  # type: ignore[override]
        return lambda x: self.last(self.first(x).relu())


class Calls:
    """A forward that is an object."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.calls = module, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.module.last(self.module.first(x).relu()) * (1 + self.calls % 2)  # type: ignore[operator]


@case("forward is an object that counts its calls")
class ObjectForward(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.forward = Calls(self)  # type: ignore[assignment]


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5  # type: ignore[misc]


class Shifted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean()  # type: ignore[misc]


class Plain(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@case("forwards of several base classes call each other")
class Cooperative(Scaled, Shifted, Plain):
    pass


class Dispatched(TwoLayers):
    @functools.singledispatchmethod
    def read(self, thing: Any) -> Tensor:
        raise TypeError

    @read.register
    def _(self, thing: Tensor) -> Tensor:
        return self.first(thing).relu()

    @read.register
    def _(self, thing: tuple) -> Tensor:  # type: ignore[type-arg]
        return sum(map(self.read, thing))  # type: ignore[return-value]


@case("a method dispatches by the class of its argument")
class Dispatches(Dispatched):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.read((x, (x * 0.5,))))


@case("the text of the module and the names of its classes decide")
class OwnText(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        gain = 2 if "Linear(in_features=16" in repr(self) else 1
        return self.last(self.first(x).relu()) * gain * len(type(self.first).__name__)


@case("parameters are counted, and asked for their dtype")
class CountsParameters(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        size = sum(one.numel() for one in self.parameters())
        return self.last(self.first(x.to(next(self.parameters()).dtype)).relu()) * (size / 1000)


@case("a weight is read from the state dict")
class FromStateDict(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        state = self.state_dict()
        return self.last(F.linear(x, state["first.weight"], state["first.bias"]).relu() + self.first(x))


@case("the sum of squares of all parameters comes with the output")
class Decay(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.stack([one.square().sum() for one in self.parameters()]).sum()
        return self.last(self.first(x).relu()), decay


@case(
    "a flag in a namespace of the caller's picks a branch",
    lambda b, n, i: (*signed_rows(b, n, i), types.SimpleNamespace(m=i % 2)),
)
class Namespace(TwoLayers):
    def forward(self, x: Tensor, options: Any) -> Tensor:
        y = self.first(x)
        return self.last(y.relu() if options.m else y.tanh())
