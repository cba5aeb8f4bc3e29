"""bench_signal: whom a verdict counts, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

Load = Callable[[str], ModuleType]


@pytest.fixture
def bench(load: Load) -> ModuleType:
    return load("bench_signal")


def ours(bench: ModuleType, **db: float) -> dict[str, Any]:
    known = {"static": 30.0, "plain": 30.0, "equalised": 0.0, "dynamic": 40.0, **db}
    return {name: bench.Found(one) for name, one in known.items()}


def test_a_peer_that_leaves_weights_float_does_not_count(bench: ModuleType) -> None:
    assert bench.verdict(ours(bench), {"peer": bench.Found(35.0)}, {}) == ("static BEHIND", False)
    assert bench.verdict(ours(bench), {"peer": bench.Found(35.0, share=0.3)}, {}) == ("ok", True)
    assert bench.verdict(ours(bench), {}, {"peer": bench.Found(45.0)}) == ("dynamic BEHIND", False)


def test_equalised_counts_as_ours_and_plain_as_what_was_before(bench: ModuleType) -> None:
    peers = {"peer": bench.Found(32.0)}
    assert bench.verdict(ours(bench, equalised=33.0), peers, {}) == ("ok", True)
    assert bench.verdict(ours(bench, equalised=35.0), peers, {}) == ("ok, gains", True)
    assert bench.verdict(ours(bench, static=25.0), {}, {}) == ("static BEHIND", False)


def test_how_much_of_the_weights_is_int8(bench: ModuleType) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "layer": nn.Linear(4, 3), "cell": nn.GRU(4, 2)})
    found = {name: sum(one.numel() for one in weights) for name, weights in bench._layers(model)}
    assert found == {"layer": 12, "cell": 6 * 4 + 6 * 2}  # tables are no layers
    layers = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Linear(6, 5)).eval()
    subject = bench._subject(layers, [{"x": torch.randn(1, 2, 8)}])
    assert bench.ours_dynamic(subject).values == 6 * 5  # a convolution has no dynamic form
