"""MovingAverageObserver: the recurrence, its two ends, and what merging promises."""

from __future__ import annotations

import math

import pytest
import torch
from quant.observers import MovingAverageObserver


def test_follows_the_recurrence() -> None:
    observer = MovingAverageObserver(momentum=0.25)
    for low, high in ((-1.0, 1.0), (-3.0, 5.0), (0.0, 1.0)):
        observer(torch.tensor([low, high]))
    low, high = observer.range()
    assert float(low) == pytest.approx(((-1.0 * 0.75 - 3.0 * 0.25) * 0.75) + 0.0)
    assert float(high) == pytest.approx((1.0 * 0.75 + 5.0 * 0.25) * 0.75 + 0.25)
    assert int(observer.batches) == 3


def test_momentum_one_is_the_latest_tensor_exactly() -> None:
    observer = MovingAverageObserver(momentum=1.0)
    for value in (1e30, 3.0, 0.1):
        observer(torch.tensor([-value, value]))
    assert [end.item() for end in observer.range()] == [torch.tensor(-0.1).item(), torch.tensor(0.1).item()]


def test_extremes_of_opposite_sign_do_not_overflow() -> None:
    observer = MovingAverageObserver(momentum=0.5)
    observer(torch.tensor([-3e38, -3e38]))
    observer(torch.tensor([3e38, 3e38]))
    assert float(observer.low) == 0.0


def test_a_batch_without_finite_values_does_not_count() -> None:
    observer = MovingAverageObserver(momentum=0.5)
    observer(torch.tensor([math.nan]))
    observer(torch.tensor([-1.0, 1.0]))
    observer(torch.tensor([math.inf]))
    assert int(observer.batches) == 1
    assert [float(end) for end in observer.range()] == [-1.0, 1.0]


def test_the_branch_for_finite_batches_gives_the_same_as_the_one_for_all() -> None:
    fast, general = MovingAverageObserver(momentum=0.3), MovingAverageObserver(momentum=0.3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(50, generator=generator)
        fast(x)
        general(torch.cat((x, torch.tensor([math.nan]))))
    assert torch.equal(fast.low, general.low)
    assert torch.equal(fast.high, general.high)


def test_merge_weighs_by_batches() -> None:
    one, two = MovingAverageObserver(momentum=1.0), MovingAverageObserver(momentum=1.0)
    one(torch.tensor([-1.0, 1.0]))
    for _ in range(3):
        two(torch.tensor([-5.0, 3.0]))
    one.merge(two)
    assert [float(end) for end in one.range()] == [-4.0, 2.5]
    assert int(one.batches) == 4


@pytest.mark.parametrize("momentum", [0.0, -1.0, 1.5, math.nan])
def test_a_momentum_outside_its_interval_is_refused(momentum: float) -> None:
    with pytest.raises(ValueError, match="momentum"):
        MovingAverageObserver(momentum=momentum)
