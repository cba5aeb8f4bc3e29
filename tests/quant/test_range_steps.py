"""The steps of calls of range, read from code: constants, attributes of the module, and those that are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quant.capture.range_steps import UNKNOWN, largest_step


class Settings:
    window = 9


class Counts(nn.Module):
    window, settings = 7, Settings()

    def none(self, x: Tensor) -> Any:
        return range(0, self.window, 50), range(0, 10, 3), x[:, ::5], x.shape[0] % 8, torch.arange(0, x.shape[0], 3)

    def ones(self, x: Tensor) -> Any:
        return range(x.shape[1]), range(1, x.shape[1]), [i for i in range(x.shape[0]) if i % x.shape[1] == 0]

    def slices(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0])[::3]]

    def remainders(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0]) if i % 2 == 0 and i % self.settings.window == 0]

    def numpy(self, x: Tensor) -> Any:
        return [x[int(i)] for i in np.arange(0, x.shape[0], 4, dtype=int)]

    def backwards(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0] - 1, -1, -6)]

    def constant(self, x: Tensor) -> Any:
        return [x[:, i : i + 12] for i in range(0, x.shape[1], 12)]

    def attribute(self, x: Tensor) -> Any:
        n = x.size(1)
        for i in range(n % 3, max(n - 2, 0), self.window):
            x = x + i
        return x

    def deeper(self, x: Tensor) -> Any:
        return sum(x[i] for i in range(0, len(x), self.settings.window))

    def computed(self, x: Tensor) -> Any:
        step = self.window * 2
        return list(range(0, x.shape[0], step))

    def inside(self, x: Tensor) -> Any:
        def parts() -> Any:
            return [x[i] for i in range(0, x.shape[0], 5)]

        return parts()

    def by_helper(self, x: Tensor) -> Any:
        return self.constant(x)


@pytest.mark.parametrize(
    ("forward", "step"),
    [(Counts.none, 0), (Counts.ones, 1), (Counts.slices, 3), (Counts.remainders, 9), (Counts.numpy, 4),
     (Counts.backwards, 6), (Counts.constant, 12), (Counts.attribute, 7), (Counts.deeper, 9),
     (Counts.computed, UNKNOWN), (Counts.inside, 5), (Counts.by_helper, 12)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_the_largest_step_by_which_code_counts_to_a_size(forward: Callable[..., Any], step: float) -> None:
    assert largest_step(Counts(), forward) == step
