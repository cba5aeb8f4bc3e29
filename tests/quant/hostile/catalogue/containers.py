"""Containers of tensors of every kind, and outputs that are no tensors."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, rows, uniform


class Named(NamedTuple):
    logits: Tensor
    hidden: Tensor | None = None


class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """As Hugging Face's ModelOutput: a dict whose keys are attributes too."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        for key, value in values.items():
            object.__setattr__(self, key, value)


class Bag(list):  # type: ignore[type-arg]
    """A list with an attribute."""

    def __init__(self, values: Any, name: str) -> None:
        super().__init__(values)
        self.name = name


class Pair(tuple):  # type: ignore[type-arg]
    """A tuple with a constructor of its own."""

    def __new__(cls, one: Tensor, other: Tensor) -> Pair:
        return super().__new__(cls, (one, other))


@case("returns a named tuple with None in it")
class ReturnsNamed(TwoLayers):
    def forward(self, x: Tensor) -> Named:
        return Named(self.last(self.first(x).relu()))


@case("returns a subclass of OrderedDict with attributes")
class ReturnsOutput(TwoLayers):
    def forward(self, x: Tensor) -> Output:
        y = self.first(x).relu()
        return Output(logits=self.last(y), hidden=y)


@case("returns a subclass of list with an attribute")
class ReturnsBag(TwoLayers):
    def forward(self, x: Tensor) -> Bag:
        y = self.first(x).relu()
        return Bag([self.last(y), y], name="bag")


@case("returns a subclass of tuple with a constructor of its own")
class ReturnsPair(TwoLayers):
    def forward(self, x: Tensor) -> Pair:
        y = self.first(x).relu()
        return Pair(self.last(y), y)


@case("returns a defaultdict")
class ReturnsDefaultDict(TwoLayers):
    def forward(self, x: Tensor) -> Any:
        found: Any = collections.defaultdict(list)
        found["all"].append(self.first(x).relu())
        found["all"].append(self.last(found["all"][0]))
        return found


@case("returns a dict with keys that are no strings")
class ReturnsOddKeys(TwoLayers):
    def forward(self, x: Tensor) -> dict[Any, Tensor]:
        y = self.first(x).relu()
        return {0: y, (1, 2): self.last(y), torch.float32: x, None: x + 1}


@case("returns a UserDict between its modules")
class UserDictInside(TwoLayers):
    def forward(self, x: Tensor) -> Any:
        found = collections.UserDict(y=self.first(x))
        return self.last(found["y"].relu())


@case("returns nested lists, tuples and dicts")
class ReturnsNested(TwoLayers):
    def forward(self, x: Tensor) -> Any:
        y = self.first(x).relu()
        return [(y, {"last": [self.last(y), None]}), (), [], {}, 3, "text", 2.5, True]


@case("returns one tensor twice", read=lambda out: (out[0] is out[1], out))
class ReturnsTwice(TwoLayers):
    def forward(self, x: Tensor) -> Any:
        y = self.last(self.first(x).relu())
        return y, y


@case("returns its input as it is, beside a result", read=lambda out: out)
class ReturnsInput(TwoLayers):
    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x).relu()), x


@case("returns a view of its input, beside a result")
class ReturnsInputView(TwoLayers):
    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x).relu()), x[:, ::2], x.t()


@case("returns a parameter, beside a result")
class ReturnsParameter(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.5))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x).relu()) * self.scale, self.scale


@case("returns a generator", refusal="a generator runs after the call")
class ReturnsGenerator(TwoLayers):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        y = self.first(x).relu()
        yield y
        yield self.last(y)


@case("returns a zip of two lists", read=list)
class ReturnsZip(TwoLayers):
    def forward(self, x: Tensor) -> Any:
        y = self.first(x).relu()
        return zip([y, x], [self.last(y), x], strict=True)


@case("returns a function that holds an activation", read=lambda f: f(2.0))
class ReturnsFunction(TwoLayers):
    def forward(self, x: Tensor) -> Callable[[float], Tensor]:
        y = self.first(x).relu()

        def later(gain: float) -> Tensor:
            return self.last(y) * gain

        return later


@case("returns a lambda over its output", read=lambda f: f())
class ReturnsLambda(TwoLayers):
    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        y = self.last(self.first(x).relu())
        return lambda: y + 1


@case("returns a distribution", read=lambda d: (type(d).__name__, d.mean, d.log_prob(d.mean)))
class ReturnsDistribution(TwoLayers):
    def forward(self, x: Tensor) -> Any:
        return torch.distributions.Normal(self.last(self.first(x)), 0.5, validate_args=False)


@case("returns a size and a dtype")
class ReturnsSize(TwoLayers):
    def forward(self, x: Tensor) -> Any:
        y = self.last(self.first(x).relu())
        return y, y.shape, y.dtype, y.size(0), y.dim(), len(y), y.numel(), y.device, y.stride()


@case("returns whether values are in a range")
class ReturnsBool(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        return self.last(self.first(x).relu()), bool((x > 0.5).float().mean() > 0.24)


@case("returns a Python float computed from values")
class ReturnsFloat(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        y = self.first(x)
        return self.last(y.relu()), float(y.detach().square().mean()) + 1.0


@case("returns a count of values")
class ReturnsInt(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.last(self.first(x).relu()), int((x > 0).sum())


@case("returns a text about its input")
class ReturnsText(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return self.last(self.first(x).relu()), f"{tuple(x.shape)} largest {x.max():.3f}"


@case("returns nothing and writes into an argument", lambda b, n, i: (uniform(b, WIDTH), torch.zeros(b, WIDTH)))
class ReturnsNothing(TwoLayers):
    def forward(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self.last(self.first(x).relu()).detach())


def lists(batch: int, length: int, index: int) -> Inputs:
    return ([uniform(batch, WIDTH) for _ in range(2 + index % 2)],)


@case("takes a list of tensors, now two and now three", lists)
class TakesList(TwoLayers):
    def forward(self, parts: list[Tensor]) -> Tensor:
        return self.last(self.first(torch.stack(parts).mean(0)))


@case("appends its result to the list it is given", lists)
class AppendsToList(TwoLayers):
    def forward(self, parts: list[Tensor]) -> None:
        parts.append(self.last(self.first(parts[0])))


@case("takes a dict and adds a key to it", lambda b, n, i: ({"x": uniform(b, WIDTH)},))
class AddsKey(TwoLayers):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["logits"] = self.last(self.first(batch["x"]).relu())
        return batch


@case("pops from the dict it is given", lambda b, n, i: ({"x": uniform(b, WIDTH), "y": uniform(b, WIDTH)},))
class PopsKey(TwoLayers):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.last(self.first(batch.pop("x")) * 1.0) + batch["y"]


@case("itertools over pieces of a tensor")
class Itertools(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        pieces = itertools.chain(x.chunk(2, 1), reversed(x.chunk(2, 1)))
        return self.last(self.first(torch.cat(list(itertools.islice(pieces, 1, 3)), 1)))


@case("sorts pieces of a tensor by a value", rows)
class SortsPieces(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        pieces = sorted(x.split(4, 1), key=lambda piece: float(piece.sum()))
        return self.last(self.first(torch.cat(pieces, 1)))


@case("a set of the sizes and a dict keyed by shape")
class KeyedByShape(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        gains = {x.shape: 2.0, y.shape: 0.5}
        return self.last(y) * gains[y.shape] * len({x.shape, y.shape, x.shape})
