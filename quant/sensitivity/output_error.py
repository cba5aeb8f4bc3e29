"""The error of a model's outputs against the float model's, over all batches: SQNR and Kullback-Leibler divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
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
        noises: `noise` by sample, where the outputs of a call have as many samples, else by call.
    """

    signal: float = 0.0
    noise: float = 0.0
    divergence: float = 0.0
    rows: int = 0
    noises: list[float] = field(default_factory=list)

    def add(self, expected: Any, output: Any) -> None:
        """Add a call's outputs: nested, of the float model and of the other one."""
        by_sample: list[Tensor] = []
        for one, other in zip(_reals(expected), _reals(output), strict=False):
            if one.shape != other.shape or not one.numel():
                continue
            real, difference = one.double(), torch.where(one == other, 0.0, other.double() - one.double())
            self.signal += float(real[real.isfinite()].square().sum())  # masked scores are -inf in both
            self.noise += float(difference.square().sum())
            if one.dim() > 1:
                self._add_divergence(one, other)
            by_sample.append(difference.square().reshape(one.shape[0] if one.dim() else 1, -1).sum(1))
        if len({len(one) for one in by_sample}) > 1:
            by_sample = [one.sum().reshape(1) for one in by_sample]
        if by_sample:
            self.noises += torch.stack(by_sample).sum(0).tolist()

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

    def gain_over(self, other: OutputError) -> tuple[float, float]:
        """How much less noise there is than in another form's outputs of the same calls, in dB, and its standard error.

        The samples are paired. With N_i and M_i the noise of sample i here and there, R = sum N_i / sum M_i,

            gain = -10 log10 R,    error = 10 / ln 10 * sqrt(n / (n - 1) sum (N_i - R M_i)**2) / sum N_i

        nan where one of them has no noise, the error also of a single sample.
        """
        if not (0.0 < self.noise < math.inf and 0.0 < other.noise < math.inf):
            return math.nan, math.nan
        ratio, count = self.noise / other.noise, len(self.noises)
        spread = sum((own - ratio * one) ** 2 for own, one in zip(self.noises, other.noises, strict=True))
        error = math.sqrt(count / (count - 1) * spread) / self.noise if count > 1 else math.nan
        return -decibels(ratio, 1.0), 10 / math.log(10) * error

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
