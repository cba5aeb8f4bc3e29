"""The error of a model's outputs against the float model's, over all batches: SQNR and Kullback-Leibler divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quant.error_parts import decibels
from quant.runtime.trees import leaves


@dataclass
class OutputError:
    """Sums over all outputs that are floating-point tensors.

    Attributes:
        signal, noise: sums of squares, of the float model's outputs and of the differences.
        divergence, rows: the sum of KL(float || int8) in nats, and the number of distributions. A distribution is the
            softmax over the last dimension of an output, of images (N, C, H, W) over the channels.
    """

    signal: float = 0.0
    noise: float = 0.0
    divergence: float = 0.0
    rows: int = 0

    def add(self, expected: Any, output: Any) -> None:
        """Add a call's outputs: nested, of the float model and of the other one."""
        for one, other in zip(_reals(expected), _reals(output), strict=False):
            if one.shape != other.shape or not one.numel():
                continue
            real, difference = one.double(), torch.where(one == other, 0.0, other.double() - one.double())
            self.signal += float(real[real.isfinite()].square().sum())  # masked scores are -inf in both
            self.noise += float(difference.square().sum())
            if one.dim() > 1:
                self._add_divergence(one, other)

    def _add_divergence(self, expected: Tensor, output: Tensor) -> None:
        dimension = 1 if expected.dim() == 4 else -1
        if expected.shape[dimension] < 2:
            return
        log_p, log_q = (torch.log_softmax(one.double(), dimension) for one in (expected, output))
        terms = log_p.exp() * (log_p - log_q)
        self.divergence += float(torch.where(log_p == -math.inf, 0.0, terms).sum())  # 0 log 0 is 0
        self.rows += expected.numel() // expected.shape[dimension]

    @property
    def sqnr(self) -> float:
        """In dB; inf where the outputs are equal, nan where the float model's are all zero, or no reals."""
        return decibels(self.signal, self.noise) if self.signal or self.noise else math.nan

    @property
    def kl(self) -> float:
        """The mean divergence in nats; nan where no output is a distribution."""
        return self.divergence / self.rows if self.rows else math.nan

    @property
    def share(self) -> float:
        """The power of the error over that of the signal."""
        return self.noise / self.signal if self.signal > 0 else 0.0


def _reals(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
