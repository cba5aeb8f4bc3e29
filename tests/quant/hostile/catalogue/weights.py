"""Weights that are tied, computed, masked, normalised, pruned or kept in other places."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from ..cases import WIDTH, TwoLayers, case, rows, steps


@case("weights in a ParameterList")
class InParameterList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.linear(x, weight).relu()
        return x


@case("weights in a ParameterDict, by matmul")
class InParameterDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"in": torch.randn(WIDTH, 32) / 4, "out": torch.randn(32, WIDTH) / 6})

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weights["in"]).relu() @ self.weights["out"]


@case("an encoder tied to its decoder by the transposed weight")
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).relu(), self.first.weight.t())


@case("two layers that share one weight and have biases of their own")
class SharedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).relu())


@case("a weight scaled and normalised in the forward")
class ComputedWeight(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, F.normalize(self.first.weight, dim=1) * 1.5, self.first.bias).relu())


@case("a weight made by another layer from the input")
class HyperNetwork(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(WIDTH, 32 * 32)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.maker(x).view(-1, 32, 32)
        return self.last(torch.bmm(weight, self.first(x)[..., None])[..., 0].tanh())


@case("low-rank adapters beside a frozen layer")
class Adapters(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(4, WIDTH) / 4), nn.Parameter(torch.randn(32, 4) / 2)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) + x @ self.down.t() @ self.up.t()).relu())


@case("weights masked in the forward by a buffer")
class MaskedWeight(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(32)[:, None] + torch.arange(WIDTH)) % 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, self.first.weight * self.mask, self.first.bias).relu())


@case("old weight_norm")
def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, 32)), nn.ReLU(), nn.Linear(32, WIDTH))


@case("spectral norm and weight norm by parametrisation")
def parametrised() -> nn.Module:
    first = parametrizations.spectral_norm(nn.Linear(WIDTH, 32))
    last = parametrizations.weight_norm(nn.Linear(32, WIDTH))
    return nn.Sequential(first, nn.ReLU(), last)


@case("pruned weights with their masks")
def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    return model


@case("the mean of an ensemble of copies")
class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.stack([member(x) for member in self.members]).mean(0))


@case("children added after the constructor, one of them None")
def late_children() -> nn.Module:
    model = Late()
    model.add_module("first", nn.Linear(WIDTH, 32))
    model.register_module("nothing", None)
    model.last = nn.Linear(32, WIDTH)
    return model


class Late(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.nothing is not None:
            y = self.nothing(y)
        return self.last(y.relu())


@case("__getattr__ of the module forwards to a wrapped one")
class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wrapped = nn.ModuleDict({"first": nn.Linear(WIDTH, 32), "last": nn.Linear(32, WIDTH)})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return super().__getattr__("wrapped")[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@case("a lazy layer, sized by its first call")
def lazy_layer() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.Linear(32, WIDTH))
    model(torch.zeros(1, WIDTH))
    return model


@case("a mixture of experts, tokens picked per expert", lambda b, n, i: (steps(b, n, i)[0].flatten(0, 1),))  # type: ignore
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        _, chosen = x[:, :4].topk(2, -1)
        weights = self.gate(x).sigmoid()
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            row, _ = (chosen == index).nonzero(as_tuple=True)
            if row.numel():
                out = out.index_add(0, row, expert(x[row]) * weights[row, index, None])
        return out


@case("a subclass of LSTM with a method of its own", steps)
class LstmMethod(nn.Module):
    class Cell(nn.LSTM):
        def start(self, batch: int) -> tuple[Tensor, Tensor]:
            return torch.zeros(1, batch, 32), torch.zeros(1, batch, 32)

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = self.Cell(WIDTH, 32, batch_first=True), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x, self.rnn.start(x.size(0)))[0])


class TransposedLinear(nn.Module):
    """As Hugging Face's Conv1D: the weight is (in, out), and the product an addmm."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.out = out
        self.weight, self.bias = nn.Parameter(torch.randn(width, out) / width**0.5), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.out)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


@case("layers written as addmm with transposed weights", steps)
def transposed() -> nn.Module:
    return nn.Sequential(TransposedLinear(WIDTH, 32), nn.GELU(), TransposedLinear(32, WIDTH))


@case("experts in one parameter, chosen by the input", rows)
class StackedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, WIDTH, 32) / 4), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        best = x[:, :4].argmax(1)
        return self.down(torch.einsum("bi,bio->bo", x, self.up[best]).tanh())
