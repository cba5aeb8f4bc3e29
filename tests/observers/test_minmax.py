"""MinMaxObserver: the extremes, exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from quant.kernels import ACTIVATION_U8, choose_qparams
from quant.observers import MinMaxObserver
from torch import Tensor


def test_keeps_the_extremes_of_all_batches() -> None:
    observer = MinMaxObserver()
    for batch in ([1.0, 2.0], [-5.0, 0.0], [0.5, 0.5]):
        observer(torch.tensor(batch))
    low, high = observer.range()
    assert (float(low), float(high)) == (-5.0, 2.0)
    assert observer.qparams() == choose_qparams(torch.tensor(-5.0), torch.tensor(2.0), ACTIVATION_U8)


def test_distributed_without_a_process_group_is_local() -> None:
    observer = MinMaxObserver(distributed=True)
    observer(torch.tensor([1.0]))
    assert [float(end) for end in observer.range()] == [1.0, 1.0]


@pytest.mark.parametrize("odd", [False, True], ids=["finite", "nan and inf"])
@pytest.mark.parametrize(
    "laid",
    [Tensor.contiguous, lambda x: x.to(memory_format=torch.channels_last), lambda x: x.flip(3).mT.contiguous().mT],
    ids=["contiguous", "channels last", "transposed"],
)
@pytest.mark.parametrize("axis", [-4, -3, -2, -1, 0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_channels_are_read_as_they_lie(
    dtype: torch.dtype, axis: int, laid: Callable[[Tensor], Tensor], *, odd: bool
) -> None:
    x = laid(torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0))).to(dtype)
    if odd:
        x[0, 0, 0, 0], x[2, 3, 4, 5], x[1, 1, 1, 1] = torch.nan, torch.inf, -torch.inf
    observer = MinMaxObserver(dataclasses.replace(ACTIVATION_U8, axis=axis))
    observer(x)
    rows = x.to(torch.float32).movedim(axis, 0).flatten(1)
    finite = torch.isfinite(rows)
    assert torch.equal(observer.low, torch.where(finite, rows, torch.inf).amin(1))
    assert torch.equal(observer.high, torch.where(finite, rows, -torch.inf).amax(1))
    assert (int(observer.nan_count), int(observer.inf_count)) == ((1, 2) if odd else (0, 0))
