"""What `bench_new_shapes.py` counts as the cost of a shape."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_shape_has_a_first_call_and_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("bench_new_shapes")
    seen: list[int] = []

    def seconds(call: nn.Module, x: torch.Tensor) -> float:
        seen.append(len(x))
        return {1: 5.0}.get(seen.count(len(x)), 2.0)

    monkeypatch.setattr(bench, "seconds", seconds)
    assert list(bench.measure(nn.Linear(4, 4).eval(), [(3, 4), (2, 4)])) == [(5.0, 2.0), (5.0, 2.0)]
    assert seen == [3] * (1 + bench.CALLS) + [2] * (1 + bench.CALLS)
