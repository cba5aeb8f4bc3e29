"""Random numbers inside: torch's, numpy's, Python's; dropout and noise; generators of the user's own."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import WIDTH, TwoLayers, case, steps


@case("noise from torch.randn_like")
class Noise(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x + torch.randn_like(x) * 0.2).relu())


@case("noise of a fixed shape", other=None)
class FixedNoise(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x + torch.rand(WIDTH)).relu())


@case("noise from numpy's generator")
class NumpyNoise(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.uniform(-0.5, 0.5, tuple(x.shape))).float()
        return self.last(self.first(x + noise).relu())


@case("a number from Python's random")
class PythonRandom(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * (1 + random.random())


@case("layers dropped at random")
class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.8:
                x = x + layer(x)
        return x


@case("dropout that is always on")
class AlwaysDropout(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.first(x).relu(), 0.25, training=True))


@case("dropout as a module, on in training")
class Dropout(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.first(x).relu()))


@case("dropout by the functional form, on in training")
class FunctionalDropout(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.first(x).relu(), 0.25, self.training))


@case("stochastic depth written by hand, on in training")
class StochasticDepth(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x).relu())
        if self.training:
            y = y * torch.bernoulli(torch.full((len(x), 1), 0.5)) / 0.5
        return x + y


@case("a reparametrised sample, of a normal distribution")
class Sample(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        normal = torch.distributions.Normal(self.last(y), self.spread(y).exp(), validate_args=False)
        return normal.rsample()


@case("a permutation of the channels drawn at each call")
class Shuffles(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x[:, torch.randperm(WIDTH)]).relu())


@case("a mask of tokens drawn at each call", steps)
class MasksTokens(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(x.shape[:2]) > 0.3
        return self.last(self.first(x * keep[..., None]).relu())


@case("a generator of the module's own, seeded at each call")
class SeededGenerator(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        return self.last(self.first(x + torch.rand(x.shape, generator=generator)).relu())


@case("the global seed set inside")
class SetsSeed(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(11)
        return self.last(self.first(x + torch.rand_like(x)).relu())


@case("a Gumbel softmax")
class Gumbel(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gumbel_softmax(self.first(x), tau=4.0) * 8)


@case("normal_ into an empty tensor")
class NormalInPlace(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x + torch.empty_like(x).uniform_(-0.5, 0.5)).relu())


@case("rotations of the batch by a random number of places")
class RandomRoll(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.roll(int(torch.randint(1, 8, ())), 1)).relu())


@case("random numbers only in training, in eval mode none")
class TrainingNoise(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        if self.training:
            y = y + torch.rand_like(y) * 0.5
        else:
            y = y + 0.25
        return self.last(y)
