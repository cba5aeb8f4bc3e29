"""Values and arguments of unusual kinds: sparse, masked and complex tensors, nested dataclasses, generators."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, uniform


@case("a COO matrix of neighbours, coalesced")
class Neighbours(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        n = x.size(0)
        places = torch.stack([torch.arange(n).repeat(2), torch.cat([torch.arange(n), torch.arange(n).flip(0)])])
        matrix = torch.sparse_coo_tensor(places, torch.full((2 * n,), 0.5), (n, n)).coalesce()
        return self.last(torch.sparse.mm(matrix, self.first(x)).relu())


@case("a BSR matrix from an activation", other=None)
class Blocks(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = self.first(x).relu().detach()
            return self.last(y.to_sparse_bsr((4, 4)).to_dense())


@case("complex weights and a complex layer by hand")
class ComplexLayer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.polar(torch.rand(16) + 0.5, torch.rand(16)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.view_as_complex(self.first(x).unflatten(-1, (16, 2)).contiguous()) * self.turn
        return self.last(torch.cat([y.real, y.imag.abs()], -1))


@case("masked tensors of torch.masked", child=True)
class Masked(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = self.first(x)
            masked = torch.masked.masked_tensor(y.detach(), (x > 0).repeat(1, 2))
            mean = masked.mean(1).to_tensor(0.0)
        return self.last(y.relu() + mean[:, None])


@case("quantile, kthvalue and unique between layers", integers="mostly")
class Orders(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        high = torch.quantile(x, 0.8, dim=1, keepdim=True)
        low = x.kthvalue(3, dim=1, keepdim=True).values
        return self.last(self.first(x.clamp(low, high)).relu()), len(torch.unique(x > 0))


@functools.singledispatch
def reduced(thing: Any, layer: nn.Module) -> Tensor:
    raise TypeError(type(thing).__name__)


@reduced.register
def _(thing: Tensor, layer: nn.Module) -> Tensor:
    found: Tensor = layer(thing).relu()
    return found


@reduced.register
def _(thing: tuple, layer: nn.Module) -> Tensor:  # type: ignore[type-arg]
    return sum((reduced(one, layer) for one in thing), torch.zeros(()))


@case("functools.singledispatch over tensors and tuples")
class Dispatched(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(reduced((x, (x * 0.5, x.flip(1))), self.first))


@dataclass
class Piece:
    """Two tensors and how they are weighed."""

    left: Tensor
    right: Tensor
    gain: float = 0.5
    tags: list[str] = field(default_factory=list)


def piece_in_dict(batch: int, length: int, index: int) -> Inputs:
    return {"batch": {"piece": Piece(uniform(batch, WIDTH), uniform(batch, WIDTH)), "mask": uniform(batch, 1) > 0}}


@case("a dataclass in a dict among the inputs", piece_in_dict)
class TakesNested(TwoLayers):
    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        piece = batch["piece"]
        y = self.first(piece.left * piece.gain + piece.right)
        return {"y": self.last((y * batch["mask"]).relu()), "tags": piece.tags}


class Options(NamedTuple):
    """A named tuple of which most is left out."""

    x: Tensor
    gain: float = 2.0
    offset: Tensor | None = None


@case("a named tuple with defaults as the input", lambda b, n, i: (Options(uniform(b, WIDTH)),))
class TakesOptions(TwoLayers):
    def forward(self, options: Options) -> Options:
        y = self.first(options.x if options.offset is None else options.x + options.offset)
        return options._replace(x=self.last(y.relu()) * options.gain)


def generated(batch: int, length: int, index: int) -> Inputs:
    pieces = [uniform(batch, WIDTH) for _ in range(3)]
    return ((piece for piece in pieces),)


@case("a generator as the input", generated, refusal="a generator can be read once")
class TakesGenerator(TwoLayers):
    def forward(self, pieces: Iterator[Tensor]) -> Tensor:
        return self.last(sum(self.first(piece).relu() for piece in pieces))  # type: ignore[arg-type]


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, pieces: Iterator[Tensor]) -> Tensor:
        return self.inner(sum(piece.relu() for piece in pieces))  # type: ignore[arg-type]


@case("a generator handed to a child, beside a branch on values")
class HandsGenerator(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = Summed()

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.first(piece) for piece in (x, x * 0.5))
        return self.last(y if x.mean() > 5 else y.tanh())


@case("an iterator of a list as the input", lambda b, n, i: (iter([uniform(b, WIDTH), uniform(b, WIDTH)]),),
      refusal="an iterator can be read once")  # fmt: skip
class TakesIterator(TwoLayers):
    def forward(self, pieces: Iterator[Tensor]) -> Tensor:
        return self.last(self.first(next(pieces)).relu() + self.first(next(pieces)))


@case("autocast to bfloat16 around one layer, the other in float32", floor=15.0)
class PartlyAutocast(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x)
        return self.last(y.float().relu())


class Meter:
    """A number that knows how to add itself to a tensor."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __radd__(self, other: Tensor) -> Tensor:
        return other + self.value

    def __rmul__(self, other: Tensor) -> Tensor:
        return other * self.value


@case("an object with reflected operators meets a tensor")
class Reflected(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) * Meter(0.5) + Meter(0.1)).relu())  # type: ignore[operator]
