"""State where Python tells nobody of a write: iterators, class attributes, descriptors, default arguments, enums."""

from __future__ import annotations

import array
import asyncio
import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import os
import random
import re
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, steps, uniform


@dataclasses.dataclass
class Progress:
    step: int = 0
    seen: list[int] = dataclasses.field(default_factory=list)


class Mode(enum.Enum):
    SLOW = 1
    FAST = 2


PROGRESS = Progress()
SPACE = types.SimpleNamespace(gain=1.0)
RUNNING = torch.zeros(WIDTH)
STEP: contextvars.ContextVar[int] = contextvars.ContextVar("step", default=0)
BY_KIND: dict[Any, float] = {}
RECENT: collections.deque[Tensor] = collections.deque(maxlen=2)
SEEN: set[int] = set()
CHANCE = random.Random(3)
NOISE = torch.Generator()
ENDLESS: list[Iterator[float]] = []


def helper(y: Tensor) -> Tensor:
    helper.calls += 1  # type: ignore[attr-defined]
    return y * (1 + helper.calls % 3)  # type: ignore[attr-defined]


def clear() -> None:
    PROGRESS.step, PROGRESS.seen = 0, []
    SPACE.gain = 1.0
    RUNNING.zero_()
    STEP.set(0)
    BY_KIND.clear()
    RECENT.clear()
    SEEN.clear()
    CHANCE.seed(3)
    NOISE.manual_seed(5)
    ENDLESS[:] = [itertools.cycle([1.0, 2.0, 4.0])]
    helper.calls = 0  # type: ignore[attr-defined]
    Mode.FAST.uses = 0  # type: ignore[attr-defined]
    ClassHistory.history.clear()
    Described.gain.reads = 0
    defaults = DefaultArgument.forward.__defaults__
    assert defaults is not None
    defaults[0].clear()
    os.environ.pop("HOSTILE_CALLS", None)


@case(
    "next() of an iterator on the module gives the gain",
    refusal="from Python 3.14 on itertools' iterators have no copies" if sys.version_info >= (3, 14) else "",
)
class ModuleIterator(TwoLayers):
    """The gains come again: a layer behind would clip those that grow beyond what training saw, which is no fault."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * (1.0 + next(self.counter) % 3)


@case("next() of a global iterator gives the gain", reset=clear)
class GlobalIterator(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * next(ENDLESS[0])


class ClassHistory(TwoLayers):
    history: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(x.detach().mean(0))
        return self.last(self.first(x + sum(self.history) / 2).relu())


class Gain:
    """A descriptor that counts how often it is read."""

    reads = 0

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self
        self.reads += 1
        return 1.0 + self.reads % 4


class Described(TwoLayers):
    gain = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * self.gain


class DefaultArgument(TwoLayers):
    def forward(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006 - the fault in question
        seen.append(len(x))
        return self.last(self.first(x).relu()) / len(seen)


case("a list of the class grows", other=None, reset=clear)(ClassHistory)
case("a descriptor counts its reads", reset=clear)(Described)
case("a default argument grows", reset=clear)(DefaultArgument)


@case("an attribute of a function counts its calls", reset=clear)
class FunctionAttribute(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(helper(self.first(x).relu()))


@case("an enum member counts its uses", reset=clear)
class EnumState(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        Mode.FAST.uses += 1  # type: ignore[attr-defined]
        return self.last(self.first(x).relu()) * (1 + Mode.FAST.uses % 3)  # type: ignore[attr-defined]


@case("a global dataclass counts steps, in a child", reset=clear)
class GlobalDataclass(TwoLayers):
    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, y: Tensor) -> Tensor:
            PROGRESS.step += 1
            PROGRESS.seen.append(len(y))
            out: Tensor = self.layer(y) / len(PROGRESS.seen)
            return out

    def __init__(self) -> None:
        super().__init__()
        self.child = self.Child()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.child(self.first(x)).relu())


@case("a global namespace's gain grows", reset=clear)
class Namespace(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        SPACE.gain *= 1.5
        return self.last(self.first(x).relu()) * SPACE.gain


@case("a global tensor is changed in place", other=None, reset=clear)
class GlobalInPlace(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        RUNNING.mul_(0.5).add_(x.detach().mean(0))
        return self.last(self.first(x + RUNNING).relu())


@case("a global tensor is changed in place and read in the next call only", other=None, reset=clear)
class GlobalForNext(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x + RUNNING).relu())
        RUNNING.copy_(y.detach().mean(0))
        return y


@case("a context variable counts calls", reset=clear)
class CountsInContext(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        STEP.set(STEP.get() + 1)
        return self.last(self.first(x).relu()) * (1 + STEP.get() % 3)


@case("a cache keyed by dtype and size", reset=clear)
class CacheByKind(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        key = (x.dtype, tuple(x.shape))
        if key not in BY_KIND:
            BY_KIND[key] = 1.0 / len(x)
        return self.last(self.first(x).relu()) * BY_KIND[key]


@case("a global deque keeps the last inputs", other=None, reset=clear)
class GlobalDeque(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        RECENT.append(x.detach().mean(0))
        return self.last(self.first(x + sum(RECENT)).relu())


@case("a global set of sizes", reset=clear)
class GlobalSet(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        first, _ = len(x) not in SEEN, SEEN.add(len(x))  # type: ignore[func-returns-value]
        return self.last(self.first(x).relu()) * (2.0 if first else 1.0)


@case("a global generator of Python's", reset=clear)
class GlobalChance(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.last(y) if CHANCE.random() < 0.5 else self.last(y) * 2


@case("a global generator of torch's", reset=clear)
class GlobalNoise(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu() + torch.rand(32, generator=NOISE))


@case("generators of Python and numpy on the module")
class OwnChance(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.chance, self.noise = random.Random(1), np.random.default_rng(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        y = y * 2 if self.chance.random() < 0.5 else y
        return self.last(y) + (1.0 if self.noise.integers(4) == 0 else 0.0)


@case("a generator of torch's on the module, seeded once")
class OwnNoise(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu() + torch.rand(32, generator=self.noise))


@case("an environment variable counts calls", reset=clear)
class EnvironmentCounts(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        calls = int(os.environ.get("HOSTILE_CALLS", "0")) + 1
        os.environ["HOSTILE_CALLS"] = str(calls)
        return self.last(self.first(x).relu()) * (1 + calls % 3)


@case("a weak reference to a child is called")
class WeakChild(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.reference = weakref.ref(self.last)

    def forward(self, x: Tensor) -> Tensor:
        last = self.reference()
        assert last is not None
        out: Tensor = last(self.first(x).relu())
        return out


@case("a weak dictionary keeps an activation for the next child")
class WeakDictionary(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = weakref.WeakValueDictionary()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        self.kept["y"] = y
        return self.last(self.kept["y"] * 2)


@case("a numpy view of a parameter scales the output")
class ParameterView(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.view = self.first.weight.detach().numpy()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * float(np.abs(self.view).max())


class Scale:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y * (1 + self.calls % 3)


@case("a callable object on the module counts its calls")
class OwnCallable(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale(self.first(x).relu()))


def marked(batch: int, length: int, index: int) -> Inputs:
    x = uniform(batch, WIDTH)
    x.gain = 1.0 + index % 2  # type: ignore[attr-defined]
    return (x,)


@case("the input has an attribute of the caller's", marked)
class MarkedInput(TwoLayers):
    def forward(self, x: Any) -> Tensor:
        return self.last(self.first(x).relu()) * getattr(x, "gain", 0.5)


@case("an activation has an attribute that a child reads")
class MarkedActivation(TwoLayers):
    class Reads(nn.Module):
        def forward(self, y: Any) -> Tensor:
            out: Tensor = y * y.gain
            return out

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.Reads()

    def forward(self, x: Tensor) -> Tensor:
        y: Any = self.first(x).relu()
        y.gain = 2.0
        return self.last(self.reads(y))


@case("a parameter decays in each call", state=lambda m: None)
class Decays(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.gain.mul_(0.75)
        return self.last(self.first(x).relu() * self.gain)


@case("a layer's weight decays in each call")
class LayerDecays(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.mul_(0.75)
        return self.last(self.first(x).relu())


@case("a parameter's data is set in each call")
class SetsData(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        self.gain.data = self.gain.data * 0.75
        return self.last(self.first(x).relu() * self.gain)


class ChangesLayer(TwoLayers):
    """A parent's forward that changes the weight of a layer before it calls it."""

    def change(self, layer: nn.Linear) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.first)
        return self.last(self.first(x).relu())


@case("the data of a layer's weight is set to itself, clamped")
class ClampsLayer(ChangesLayer):
    def change(self, layer: nn.Linear) -> None:
        layer.weight.data = layer.weight.data.clamp(-0.1, 0.1)


@case("the data of a layer's weight is set to rows of a largest norm", state=lambda m: m.first.weight.norm(dim=1))
class RenormsLayer(ChangesLayer):
    def change(self, layer: nn.Linear) -> None:
        layer.weight.data = torch.renorm(layer.weight.data, 2, 0, 0.3)


@case("the data of a layer's weight decays in place")
class DecaysLayerData(ChangesLayer):
    def change(self, layer: nn.Linear) -> None:
        layer.weight.data.mul_(0.75)


@case("a layer's weight decays in place by a view of its detached self")
class DecaysLayerView(ChangesLayer):
    def change(self, layer: nn.Linear) -> None:
        layer.weight.detach().view(-1)[:100].mul_(0.75)


@case("a layer's weight is another parameter in each call")
class ReplacesParameter(ChangesLayer):
    def change(self, layer: nn.Linear) -> None:
        layer.weight = nn.Parameter(layer.weight.detach() * 0.75)


@case("a layer's weight gets other memory by set_")
class SetsMemory(ChangesLayer):
    def change(self, layer: nn.Linear) -> None:
        with torch.no_grad():
            layer.weight.set_(layer.weight.clamp(-0.1, 0.1))


@case("a layer of its own class keeps its weight's norm, as EEGNet's do")
class KeepsNorm(nn.Module):
    class Constrained(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.3)
            return super().forward(input)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = self.Constrained(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).relu())
        return out


@case("a layer called with a parameter swapped by hand and put back")
class SwapsByHand(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        bias = self.first._parameters["bias"]
        assert bias is not None
        self.first._parameters["bias"] = bias * 3  # type: ignore[assignment]
        y = self.first(x)
        self.first._parameters["bias"] = bias
        return self.last(y.relu())


@case("a container called with other parameters by functional_call")
class SwapsContainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        half = {name: value * 0.5 for name, value in self.block.named_parameters()}
        out: Tensor = self.last(torch.func.functional_call(self.block, half, (x,)) + self.block(x))
        return out


@case("a coroutine runs the layers")
class Coroutine(TwoLayers):
    async def steps(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return self.last(self.first(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return asyncio.new_event_loop().run_until_complete(self.steps(x))


@case("a text with sizes is parsed by a regular expression", steps)
class ParsesText(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        found = re.search(r"\[(\d+), (\d+)", str(x.shape))
        assert found is not None
        return self.last(self.first(x).relu()) * (1 + int(found.group(1)) % 4)


@case("an array of Python's holds a size")
class PythonArray(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        numbers = array.array("f", [x.size(0), 4.0])
        return self.last(self.first(x).relu()) * (1 + numbers[0] / numbers[1])


@case("a size is a key of a cached method", steps)
class CachedMethod(TwoLayers):
    @functools.lru_cache(maxsize=4)  # noqa: B019 - the fault in question
    def table(self, length: int) -> Tensor:
        return torch.linspace(0, 1, length).unsqueeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu() + self.table(x.size(1)))
