"""Whether scaling the channels of an input, or 16 bits for it, makes the layers that read it better: by measurement.

With m_j the largest |x_j| and w_j the largest |w_ij| over all layers of the group,

    s_j = m_j^alpha / w_j^(1 - alpha),    x_j / s_j,    w_ij s_j             (Xiao et al. 2022, arXiv:2211.10438, eq. 4)

moves outliers into the weights; columns = 1 / s. Nothing is assumed of what makes x. The error of y = x w' is measured
on rows of the calibration data, for some outputs, with the range that a histogram observer would take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.kernels import two_bytes
from quant.kernels.scheme import affine_qparams, weight_scale
from quant.observers import AUTO
from quant.recipe import QConfig

ALPHAS = (0.35, 0.5, 0.65, 0.8, 0.95)

OUTPUTS = 256
"""Outputs of a group whose error is measured, all layers together."""

SPREAD = 4.0
"""The largest of the channels' peaks over their median from which an input has outlier channels. Noise behind a layer
norm has 1.5, a layer norm with gains between a half and 2 has 2."""

LEAST_GAIN = 1.5
"""Gain in dB from which scaling is worth a pass over the input."""

COARSE, LEAST_FINE_GAIN = 24.0, 10.0
"""Signal to noise in dB of an output below which 8 bits are too few for its input, if 16 gain at least this much.
Convolutions of ordinary networks (ResNet, MobileNet) have 38 and more."""

NO_QUESTION = 34.0
"""Signal to noise of an input in dB from which its convolution is not computed: the output's is about the same."""

CLIPS = (1.0, 0.85, 0.7, 0.5, 0.35, 0.2)
"""The shares of the largest range among which the range with the least square error is taken."""

FAINT = 0.01
"""The share of the mean power that is added to a row's own, so that rows of zeros do not decide."""

LEAST_ROWS = 32
"""Rows from which the peaks of channels are believed."""

TINY = 1e-5
"""The least peak of a weight's column, relative to the largest one."""


@dataclass(frozen=True)
class Choice:
    """The outcome for a group of layers; signal to noise of their outputs in dB.

    Attributes:
        columns: float32 (in,), what the input is multiplied by; None leaves it.
        alpha: of the columns.
        plain: as it is, with the bits of the settings: 8, or 16 where these are asked for.
        scaled: with these bits and the columns.
        fine: with 16 bits and the columns.
    """

    columns: Tensor | None
    alpha: float
    plain: float
    scaled: float
    fine: float

    @property
    def takes_two_bytes(self) -> bool:
        """Whether 8 bits are too few, with columns or without."""
        best = max(self.plain, self.scaled)
        return best < COARSE and self.fine > best + LEAST_FINE_GAIN

    def __str__(self) -> str:
        by_channel = "" if self.columns is None else f"input scaled by channel (alpha {self.alpha})"
        now, before = self.scaled, self.plain
        if self.takes_two_bytes:
            by_channel = "16 bits for its input" + (f", {by_channel}" if by_channel else "")
            now, before = self.fine, max(self.plain, self.scaled)
        return f"{by_channel}: {now:.1f} dB instead of {before:.1f}, measured"


def choose(rows: Tensor, low: Tensor, high: Tensor, weights: Sequence[Tensor], qconfig: QConfig) -> Choice:
    """Choose for the linear layers that read one input.

    Args:
        rows: float32 (n, in), some of the input.
        low, high: float32 (in,), its extremes.
        weights: float32 (out, in), of all layers.
        qconfig: of the layers.
    """
    measure = _Measure(rows, low, high, weights, qconfig)
    ones = torch.ones_like(low)
    plain = scaled = measure.snr(ones)
    peaks = torch.maximum(-low, high)
    columns, alpha = None, 0.0
    if len(rows) >= LEAST_ROWS and float(peaks.max()) > SPREAD * float(peaks.median()):
        tried = {one: columns_of(peaks, weights, one) for one in ALPHAS}
        snrs = {one: measure.snr(tried[one]) for one in ALPHAS}
        best = max(ALPHAS, key=snrs.__getitem__)
        if snrs[best] > plain + LEAST_GAIN:
            columns, alpha, scaled = tried[best], best, snrs[best]
    # 16 bits take the columns of 8: a layer that is lifted from one to the other keeps its weight. And small columns of
    # a weight are lost beside large ones whatever bits its input has.
    fine = measure.snr(ones if columns is None else columns, two=True)
    if qconfig.activation_bits == 16:
        plain, scaled = measure.snr(ones, two=True), fine
    return Choice(columns, alpha, plain, scaled, fine)


def choose_bits(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor, low: Tensor, high: Tensor, weight: Tensor, qconfig: QConfig
) -> Choice | None:
    """The same for a convolution, whose input is never scaled; None where 8 bits are enough.

    Args:
        product: of an input and a weight, without bias.
        x: some of the input, a sample for each index.
        low, high: float32 (), its extremes.
    """
    rounded = x
    for clips in (CLIPS[:1], _clips(qconfig)):  # nearly always the first is enough, and takes a sixth of the time
        rounded = _rounded(x, low, high, clips)
        if _snr(x, rounded) > NO_QUESTION:
            return None
    q_weight, exact = _rounded_weight(weight, weight, qconfig), product(x, weight)
    plain = _snr(exact, product(rounded, q_weight))
    fine = _snr(exact, product(_rounded(x, low, high, CLIPS[:1], two=True), q_weight))
    return Choice(None, 0.0, plain, plain, fine)


def columns_of(peaks: Tensor, weights: Sequence[Tensor], alpha: float) -> Tensor:
    """1 / s, with a geometric mean of 1.

    Peaks below the median count as that: outliers are scaled down, and no channel is scaled up for being small on the
    few rows that were looked at, since on others it may not be.
    """
    largest = torch.stack([one.abs().amax(0) for one in weights]).amax(0)
    own = largest.clamp(min=max(TINY * float(largest.max()), 1e-30))
    inputs = peaks.clamp(min=max(float(peaks.median()), TINY * float(peaks.max())))
    logarithm = (1 - alpha) * own.double().log() - alpha * inputs.double().log()
    return (logarithm - logarithm.mean()).exp().float()


class _Measure:
    """The error of a group's outputs for given columns."""

    def __init__(self, rows: Tensor, low: Tensor, high: Tensor, weights: Sequence[Tensor], qconfig: QConfig) -> None:
        self.rows, self.low, self.high, self.qconfig = rows, low, high, qconfig
        share = max(OUTPUTS // len(weights), 1)
        self.whole = weights
        self.some = [one[torch.linspace(0, len(one) - 1, min(share, len(one))).long()] for one in weights]
        self.exact = [rows @ one.t() for one in self.some]

    def snr(self, columns: Tensor, *, two: bool = False) -> float:
        """Signal to noise of the outputs in dB, the layers' powers made equal."""
        low, high = (self.low * columns).min(), (self.high * columns).max()
        x = _rounded(self.rows * columns, low, high, _clips(self.qconfig), two=two)
        share = 0.0
        for whole, some, exact in zip(self.whole, self.some, self.exact, strict=True):
            q = _rounded_weight(some / columns, whole / columns, self.qconfig)
            share += 10 ** (-_snr(exact, x @ q.t()) / 10)
        return -10 * math.log10(share / len(self.some))


def _snr(exact: Tensor, other: Tensor) -> float:
    """Signal to noise in dB, as the mean over rows (n, ...) of noise to signal.

    Each row counts alike: what follows normalises rows, or looks at each by itself. Some models have huge values
    for their first token or for full stops, which would outweigh the noise that their range makes in all other rows.
    """
    signal, noise = exact.flatten(1).square().sum(1), (exact - other).flatten(1).square().sum(1)
    share = float((noise / (signal + FAINT * signal.mean() + 1e-30)).mean())
    return -10 * math.log10(max(share, 1e-12))


def _rounded_weight(some: Tensor, whole: Tensor, qconfig: QConfig) -> Tensor:
    """Some rows of a weight rounded, by a scale for each row or for the whole weight."""
    rows = (some if qconfig.per_channel else whole).flatten(1)
    scale = weight_scale(rows if qconfig.per_channel else rows.reshape(1, -1), bits=qconfig.weight_bits)
    top = 2 ** (qconfig.weight_bits - 1) - 1
    scale = scale.reshape(-1, *[1] * (some.dim() - 1))
    return (some / scale).round().clamp(-top, top) * scale


def _clips(qconfig: QConfig) -> Sequence[float]:
    """The shares of the largest range among which an observer of 8 bits chooses."""
    return CLIPS if qconfig.activation_observer == AUTO else CLIPS[:1]


def _rounded(x: Tensor, low: Tensor, high: Tensor, clips: Sequence[float], *, two: bool = False) -> Tensor:
    """x rounded by the range that its observer would choose; by all of it for two bytes."""
    best, least = x, math.inf
    for clip in clips:
        scale, zero_point = affine_qparams(low.clamp(max=0.0) * clip, high.clamp(min=0.0) * clip, 0, 255)
        if two:
            return two_bytes.rounded(x, scale, zero_point)
        q = ((x / scale).round() + zero_point).clamp(0, 255)
        real = (q - zero_point) * scale
        error = float((real - x).square().sum())
        if error < least:
            best, least = real, error
    return best
