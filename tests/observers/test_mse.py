"""MSEObserver: weights per channel, against a search over the weights themselves."""

from __future__ import annotations

import pytest
import torch
from quant.kernels import WEIGHT_S8, QParams, choose_qparams, quantize_weight, weight_scheme
from quant.observers import MSEObserver
from torch import Tensor


def errors(weight: Tensor, qparams: QParams) -> Tensor:
    """Root mean square error of each row."""
    return (qparams.dequantize(qparams.quantize(weight)) - weight).double().square().mean(dim=1).sqrt()


def weights() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    heavy = torch.randn(32, 144, generator=generator) * torch.randn(32, 144, generator=generator).abs()
    return heavy * torch.logspace(-3, 3, 32).view(32, 1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_each_channel_is_within_the_bound_of_the_best_candidate(bits: int) -> None:
    weight, scheme = weights(), weight_scheme(bits)
    observer = MSEObserver(scheme)
    observer(weight)
    bound = weight.abs().amax(dim=1)
    best = torch.full((32,), torch.inf, dtype=torch.float64)
    for share in torch.linspace(0.05, 1.0, 96):
        best = torch.minimum(best, errors(weight, choose_qparams(-bound * share, bound * share, scheme)))
    widths = torch.tensor([2.0**exponent for exponent in observer.exponents() if exponent is not None])
    assert bool((errors(weight, observer.qparams()) <= 1.02 * best + 2 * widths).all())


def test_four_bits_gain_over_the_largest_weight() -> None:
    weight = weights()
    observer = MSEObserver(weight_scheme(4))
    observer(weight)
    q_weight, scale = quantize_weight(weight, bits=4)
    plain = errors(weight, QParams(scale, torch.zeros(32, dtype=torch.int32), weight_scheme(4)))
    assert float((errors(weight, observer.qparams()) / plain).mean()) < 0.95
    assert q_weight.abs().max() <= 7


def test_the_default_is_the_scheme_of_weights() -> None:
    assert MSEObserver().scheme == WEIGHT_S8


def test_a_channel_of_zeros_stays_zero() -> None:
    observer = MSEObserver()
    weight = torch.stack((torch.zeros(9), torch.ones(9)))
    observer(weight)
    qparams = observer.qparams()
    assert torch.equal(qparams.dequantize(qparams.quantize(weight))[0], torch.zeros(9))
