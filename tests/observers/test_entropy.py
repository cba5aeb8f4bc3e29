"""EntropyObserver: the divergence against scipy's, and thresholds where theory puts them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quant.kernels import ACTIVATION_U8, weight_scheme
from quant.observers import EntropyObserver
from quant.observers.entropy import best_threshold, divergence
from scipy.stats import entropy as scipy_entropy


def divergence_ref(counts: np.ndarray, start: int, stop: int, buckets: int) -> float:
    """As the slides of Migacz describe it, a bucket at a time; the end bins are filled, so nothing is smoothed."""
    p = counts[start:stop].copy()
    p[0] += counts[:start].sum()
    p[-1] += counts[stop:].sum()
    q = np.zeros_like(p)
    owner = np.arange(stop - start) * buckets // (stop - start)
    for bucket in range(buckets):
        members = (owner == bucket) & (counts[start:stop] > 0)
        q[members] = counts[start:stop][members].mean() if members.any() else 0.0
    return float(scipy_entropy(p, q))


@pytest.mark.parametrize(("start", "stop"), [(0, 512), (100, 400), (256, 300), (0, 40)])
def test_the_divergence_is_scipys(start: int, stop: int) -> None:
    counts = np.random.default_rng(0).integers(1, 1000, 512).astype(np.float64)
    counts[np.arange(512) % 7 == 3] = 0.0
    counts[start], counts[stop - 1] = 5.0, 7.0
    ours = divergence(torch.from_numpy(counts), start, stop, 32)
    assert ours == pytest.approx(divergence_ref(counts, start, stop, 32), abs=1e-12)


def test_a_bin_that_only_the_tail_fills_is_finite() -> None:
    counts = torch.tensor([5.0, 5.0, 0.0, 7.0], dtype=torch.float64)
    assert 0.0 < divergence(counts, 0, 3, 2) < float("inf")
    assert divergence(counts, 2, 3, 2) == float("inf")


def test_an_outlier_is_cut_and_a_uniform_range_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    for scheme in (ACTIVATION_U8, weight_scheme(8, None)):
        observer = EntropyObserver(scheme)
        observer(torch.cat((torch.randn(50_000, generator=generator), torch.tensor([100.0]))))
        assert 2.0 < float(observer.range()[1]) < 30.0
        observer = EntropyObserver(scheme)
        observer(torch.rand(50_000, generator=generator))
        assert float(observer.range()[1]) > 0.95


def test_one_sided_data_use_every_step() -> None:
    observer = EntropyObserver()
    observer(torch.randn(50_000, generator=torch.Generator().manual_seed(0)).relu())
    low, high = observer.range()
    assert float(low) == 0.0
    assert int(observer.qparams().zero_point) == 0
    assert 2.5 < float(high) < 4.6


def test_the_peak_at_zero_does_not_decide() -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).relu()
    plain, peaked = EntropyObserver(), EntropyObserver()
    plain(x)
    peaked(torch.cat((x, torch.zeros(500_000))))
    assert plain.range() == peaked.range()


def test_fewer_bins_than_steps_keeps_all() -> None:
    counts = torch.zeros(2048, dtype=torch.float64)
    counts[:100] = 1.0
    assert best_threshold(counts, 0, 127) == 100
