"""Searches candidate ranges for the one with the smallest error.

The error is measured, not modelled as rounding noise: each candidate's quantise-dequantise is applied to the bins. So
exact zeros have no error, clipping has its real error, and the search is right for 2 bits as for 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from quant.kernels import QScheme, choose_qparams
from torch import Tensor

COARSE = 2.0 ** (-torch.arange(0, 49, dtype=torch.float64) / 8)
"""Shares of an end that are tried first: 1 down to 1/64, each 8 % below the one before."""

FINE = torch.linspace(1.09, 0.92, 18, dtype=torch.float64)
"""Factors tried around the best coarse share, one coarse step to either side."""

Error = Callable[[Tensor, Tensor], Tensor]
"""(low, high), each float64 (candidates,) -> error float64 (candidates,)."""


def squared_error(values: Tensor, weights: Tensor, scheme: QScheme) -> Error:
    """The error function sum_i weights_i * (dequantize(quantize(v_i)) - v_i)**2 of a range.

    Args:
        values: float64 (n,).
        weights: float64 (n,), how often each occurs.
        scheme: per tensor or not; its axis is not used.
    """
    by_candidate = replace(scheme, axis=0)
    exact = values.to(torch.float32).expand(1, -1)

    def error(low: Tensor, high: Tensor) -> Tensor:
        qparams = choose_qparams(low.to(torch.float32), high.to(torch.float32), by_candidate)
        back = qparams.dequantize(qparams.quantize(exact)).to(torch.float64)
        return (back - values).square() @ weights

    return error


def best_range(error: Error, low: float, high: float, symmetric: bool) -> tuple[float, float]:
    """The range within [low, high] and zero with the smallest error among those tried; of equals, the widest.

    First both ends are shrunk together, then, where there are two and they are free, one after the other, twice: the
    error has one valley along each in practice, and 250 candidates take the place of the 2,400 pairs of a full grid.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    together = _best(error, low, high, COARSE, COARSE)
    shares = _refine(error, low, high, together, both=True)
    if not symmetric and low < 0.0 < high:
        for _ in range(2):
            for end in (0, 1):
                shares = _one_end(error, low, high, shares, end)
    return low * shares[0], high * shares[1]


def _one_end(error: Error, low: float, high: float, shares: tuple[float, float], end: int) -> tuple[float, float]:
    candidates = [torch.full_like(COARSE, shares[0]), torch.full_like(COARSE, shares[1])]
    candidates[end] = COARSE
    moved = _best(error, low, high, *candidates)
    return _refine(error, low, high, moved, both=False, end=end)


def _refine(
    error: Error, low: float, high: float, shares: tuple[float, float], *, both: bool, end: int = 0
) -> tuple[float, float]:
    factors = [FINE if both or end == index else torch.ones_like(FINE) for index in (0, 1)]
    candidates = [
        torch.cat((torch.tensor([s], dtype=torch.float64), (s * f).clamp(max=1.0)))
        for s, f in zip(shares, factors, strict=True)
    ]
    return _best(error, low, high, *candidates)


def _best(error: Error, low: float, high: float, low_shares: Tensor, high_shares: Tensor) -> tuple[float, float]:
    index = int(error(low * low_shares, high * high_shares).argmin())
    return low_shares[index].item(), high_shares[index].item()
