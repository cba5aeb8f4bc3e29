"""MinMaxObserver: the extremes, exactly."""

from __future__ import annotations

import torch
from quant.kernels import ACTIVATION_U8, choose_qparams
from quant.observers import MinMaxObserver


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
