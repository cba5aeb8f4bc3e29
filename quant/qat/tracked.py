"""Ranges of a model in training as plain numbers, for a logger."""

from __future__ import annotations

from torch import nn

from quant.observers import NoDataSeen
from quant.observers.fake_quantize import FakeQuantizeBase
from quant.qat.switches import training_runners


def tracked_ranges(prepared: nn.Module) -> dict[str, float]:
    """The ends of each range, "<layer>/low" and "<layer>/high"; of a weight with a learned scale "<layer>.weight/low".

    They are the real values of the smallest and the largest integer, the widest of all channels. What saw no data yet
    is left out. Reading them waits for a GPU that holds them.

    Raises:
        ValueError: `prepared` is not from prepare_qat.
    """
    found: dict[str, float] = {}
    for runner in training_runners(prepared):
        learned = {id(one) for one in runner.weights.values()}
        for one in runner.modules():
            if isinstance(one, FakeQuantizeBase):
                name = one.name or "(root)"
                found |= _ends(f"{name}.weight" if id(one) in learned else name, one)
    return found


def _ends(name: str, one: FakeQuantizeBase) -> dict[str, float]:
    try:
        qparams = one.qparams()
    except NoDataSeen:
        return {}
    low, high = qparams.ends().unbind(1)
    return {f"{name}/low": low.min().item(), f"{name}/high": high.max().item()}
