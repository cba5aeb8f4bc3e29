"""What a row of the zoo is: a name, how its model is made, what it is given, and how it is called."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

Batch: TypeAlias = Any
"""A tensor, a tuple of positional or a mapping of keyword arguments; another kind where `Entry.call` reads it."""


def call_model(model: nn.Module, batch: Batch) -> Any:
    """The model's outputs for a batch as `quant.prepare` takes one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple):
        return model(*batch)
    return model(batch)


@dataclass(frozen=True)
class Entry:
    """One architecture.

    Attributes:
        name: of the row; what stands before the first underscore is where the model comes from.
        make: the model, its weights random.
        batch: inputs of so many samples, random.
        call: (model, batch) to outputs.
        example: of a batch, the inputs that the model is prepared with for training; None where they are the batch.
        training_batch: inputs in training mode where they are others, as a detector's with its targets.
        size: samples of a batch for calibration.
        other_size: samples of the second batch that is checked.
        detects: the outputs are boxes in order of their scores, which are compared as a set.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    call: Callable[[nn.Module, Batch], Any] = call_model
    example: Callable[[Batch], Batch] | None = None
    training_batch: Callable[[int], Batch] | None = None
    size: int = 4
    other_size: int = 3
    detects: bool = False

    def seed(self) -> int:
        """The same for a name in every run, and another for every name."""
        return zlib.crc32(self.name.encode())

    def build(self) -> nn.Module:
        """The model in eval mode: the same weights each time, none without effect, and calibrated batch norms."""
        torch.manual_seed(self.seed())
        model = self.make().eval()
        wake(model)
        calibrate_norms(model, [self.draw(-1 - i, self.size) for i in range(3)], self.call)
        return model

    def draw(self, index: int, size: int, *, training: bool = False) -> Batch:
        """The batch of this number: the same in every run, and another for every number."""
        torch.manual_seed(self.seed() + 1000 + index)
        return (self.training_batch if training and self.training_batch else self.batch)(size)

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """The outputs for a copy of the batch, since some models write into their inputs."""
        return self.call(model, copy.deepcopy(batch))


def wake(model: nn.Module) -> None:
    """Give values to parameters that start at zero or near it, as the last scale of a residual branch, and to weights
    so small that only the biases after them would be seen: else a network that ignores its inputs would pass."""
    with torch.no_grad():
        for name, module in model.named_modules():
            # Boxes stay near their anchors: far from them they are cut to nothing at the edge of the image.
            if not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or "bbox" in name:
                continue
            typical, deviation = module.weight[0].numel() ** -0.5, module.weight.std()
            if deviation >= 0.7 * typical:
                continue
            if parametrize.is_parametrized(module, "weight"):
                module.parametrizations.weight.original0.mul_(typical / deviation)  # the norm of a weight norm
            elif isinstance(module.weight, nn.Parameter):
                module.weight.normal_(0, typical)
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or not parameter.numel() or parameter.abs().max() > 0.01:
                continue
            last = name.rpartition(".")[2]
            if "bias" in last or last in ("b", "beta"):
                parameter.uniform_(-0.1, 0.1)
            else:
                parameter.uniform_(0.2, 0.6)


def calibrate_norms(model: nn.Module, batches: list[Batch], call: Callable[[nn.Module, Batch], Any]) -> None:
    """Give every batch norm the statistics of the batches, by running it, and nothing else, in training mode."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    norms = [norm for norm in norms if norm.track_running_stats]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over all calls
        norm.train()
    with torch.no_grad():
        for batch in batches:
            call(model, copy.deepcopy(batch))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def images(side: int, channels: int = 3) -> Callable[[int], Tensor]:
    """Random square images of that many pixels a side."""
    return lambda size: torch.randn(size, channels, side, side)


def tensors(*shape: int) -> Callable[[int], Tensor]:
    """Random values, samples in the first dimension."""
    return lambda size: torch.randn(size, *shape)
