"""What `bench_memory.py` reads of a process, and its table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from quant.kernels import ops
from torch import Tensor, nn


class Held(nn.Module):
    """A layer whose call takes 64 MiB on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + torch.ones(16 << 20).sum()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_step_is_measured_at_its_peak(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = load("bench_memory")
    monkeypatch.setattr(bench, "CASES", {"tiny": (Held, (2, 8), bench.dynamically)})
    file = tmp_path / "tiny.q8"
    found = {step: bench.measure("tiny", step, file) for step in bench.STEPS}
    for step in ("float", "run"):
        assert found[step]["peak"] > 60 << 20
        assert found[step]["after"] < found[step]["peak"]
    packed = {step: found[step]["packed"] for step in bench.STEPS}
    assert packed["float"] == 0
    assert (packed["run"] > 0) == (not ops.extension_problem())


def test_the_table_has_a_row_for_each_step(load: Callable[[str], ModuleType]) -> None:
    bench = load("bench_memory")
    sizes = {"peak": 4 << 20, "after": 2 << 20, "packed": 1 << 19}
    found = {"float": {**sizes, "packed": 0}, "quantize": {**sizes, "peak": 6 << 20}, "run": {**sizes, "peak": 2 << 20}}
    rows = [line.split() for line in bench.table("tiny", found).splitlines()[-3:]]
    assert [row[-4:] for row in rows] == [
        ["4.0", "2.0", "0.0", "1.00"],
        ["6.0", "2.0", "0.5", "1.50"],
        ["2.0", "2.0", "0.5", "0.50"],
    ]
