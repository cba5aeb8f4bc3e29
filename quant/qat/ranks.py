"""Training in several processes: every rank uses the ranges of the joint batch.

DistributedDataParallel averages gradients, and before each forward overwrites every rank's buffers by those of rank 0.
Ranges are buffers: left alone, each rank would have its own, all but rank 0's would be lost, and a value that only
another rank saw would be clamped. So each batch's extremes are reduced over the ranks before they are used, one small
collective per range and training forward: all ranks then hold the ranges of the joint batch, and overwriting them by
rank 0's changes nothing. Batch norms are the user's: each rank has its own statistics, as in float.
"""

from __future__ import annotations

import warnings

import torch

from quant.observers import LSQFakeQuantize, PACTFakeQuantize
from quant.observers.base import RangeObserver
from quant.observers.fake_quantize import FakeQuantize, FakeQuantizeBase


def several() -> bool:
    """Whether the default process group has more than one rank."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def warn_of_ranks(path: str) -> bool:
    """Warn where there are several ranks and `sync_ranges` was not called; returns whether it warned.

    Args:
        path: of the module that trains.

    Warns:
        UserWarning: in that case.
    """
    if torch.compiler.is_compiling() or not several():
        return False
    warnings.warn(
        f"layer '{path or '(root)'}': trains on one of {torch.distributed.get_world_size()} ranks, and "
        "its ranges are those of its own data; build a QATSchedule after init_process_group, or call "
        "quant.qat.sync_ranges(prepared), on every rank (sync_ranges(prepared, False) if this is meant)",
        stacklevel=4,
    )
    return True


def sync_range(fake_quantizer: FakeQuantizeBase, on: bool) -> None:
    """Make a fake quantiser use the range of all ranks' data, or of its own; see `switches.sync_ranges`."""
    if isinstance(fake_quantizer, LSQFakeQuantize):
        fake_quantizer.distributed = on
    elif isinstance(fake_quantizer, FakeQuantize):
        for one in fake_quantizer.modules():
            if isinstance(one, RangeObserver):
                one.distributed = on
    else:
        assert isinstance(fake_quantizer, PACTFakeQuantize), fake_quantizer  # alpha's start does not depend on data
