"""The switches of a model that trains: rounding, observing, frozen ranges and norms. QATSchedule sets them in turn."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from quant.observers.fake_quantize import FakeQuantizeBase
from quant.qat.ranks import sync_range
from quant.qat.runner import TrainingRunner
from quant.static.runner import runners


def observe_only(prepared: nn.Module) -> None:
    """Train in float and only observe, so that ranges are known before anything is rounded by them."""
    _switch(prepared, rounding=False, observing=True)


def round_values(prepared: nn.Module) -> None:
    """Round weights and activations, with ranges that follow the data. How a model from prepare_qat begins."""
    _switch(prepared, rounding=True, observing=True)


def freeze_ranges(prepared: nn.Module, frozen: bool = True) -> None:
    """Keep the ranges of activations, and learned scales, as they are. Other weights' ranges follow the weights.

    Warns:
        UserWarning: a range that is frozen is empty, with the layer's name.
    """
    for one in fake_quantizers(prepared):
        one.set_observing(not frozen)


def freeze_norms(prepared: nn.Module, frozen: bool = True) -> None:
    """Let batch norms normalise by their running statistics, as the converted model will, and keep those."""
    for runner in training_runners(prepared):
        runner.switch("norms_frozen", frozen)


def sync_ranges(prepared: nn.Module, on: bool = True) -> None:
    """Take ranges of the joint batch of all ranks of the default process group; QATSchedule does so by itself.

    From then on a forward in training mode is a collective while ranges follow the data (where they are learned: the
    first that rounds), so that all ranks must run it, as DistributedDataParallel wants anyway. Without a process group
    nothing changes.

    Args:
        prepared: from `prepare_qat`, wrapped or not.
        on: False for ranges per process, as where the ranks train different models.

    Raises:
        ValueError: it is not from prepare_qat.
    """
    for one in fake_quantizers(prepared):
        sync_range(one, on)
    for runner in training_runners(prepared):
        runner.synced = on


def fake_quantizers(prepared: nn.Module) -> Iterator[FakeQuantizeBase]:
    """Every fake quantiser of a model from prepare_qat."""
    for runner in training_runners(prepared):
        yield from (module for module in runner.modules() if isinstance(module, FakeQuantizeBase))


def training_runners(prepared: nn.Module) -> list[TrainingRunner]:
    """The runners of the captured modules of a model from prepare_qat.

    Raises:
        ValueError: it is not from prepare_qat.
    """
    training = [runner for runner in runners(prepared).values() if isinstance(runner, TrainingRunner)]
    if not training:
        raise ValueError(f"expected a model from quant.prepare_qat, got {type(prepared).__name__}")
    return training


def _switch(prepared: nn.Module, *, rounding: bool, observing: bool) -> None:
    for runner in training_runners(prepared):
        runner.switch("rounding", rounding)
    for one in fake_quantizers(prepared):
        one.set_observing(observing)
        one.set_quantizing(rounding)
