"""Warnings of mistakes that training would hide: parameters nobody trains, empty ranges, unsettled statistics."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from quant.observers import NoDataSeen
from quant.qat.runner import TrainingRunner
from quant.runtime.names import full_name
from quant.static.runner import runners

SETTLED = 0.1
"""The share that a batch norm's first values (0 and 1) may still have in its running statistics at convert."""


def check_optimizer(prepared: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of parameters that require a gradient and that the optimiser does not hold.

    Warns:
        UserWarning: there are some, with their names. An optimiser built before `prepare_qat` holds those of the float
            model, and would train nothing here.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    lost = [name for name, one in prepared.named_parameters() if one.requires_grad and id(one) not in held]
    if lost:
        warnings.warn(
            f"the optimiser does not hold {len(lost)} parameters that require a gradient: {_some(lost)}; give it the "
            "parameters of the model that prepare_qat returned, or set requires_grad to False",
            stacklevel=2,
        )
    return lost


def check_trained(prepared: nn.Module) -> None:
    """Warn of what makes a trained model's integers wrong; called by convert.

    Warns:
        UserWarning: values were never rounded, but only observed; a range is empty, so that a layer gives zeros;
            or a batch norm's running statistics, which is all that the int8 model has, are still mostly what they
            began with.
    """
    for path, runner in runners(prepared).items():
        if not isinstance(runner, TrainingRunner):
            continue
        if not runner.is_on("rounding"):
            warnings.warn(
                f"quant.convert: layer '{path or '(root)'}' still observes in float, so nothing was trained for "
                "rounding; train past the schedule's first phase, or call quant.qat.round_values(prepared) and go on",
                stacklevel=4,
            )
        empty = [name for name in runner.fused.slots if _collapsed(runner, name)]
        if empty:
            warnings.warn(
                f"quant.convert: only zeros were seen at {_some([full_name(path, name) for name in empty])}; the "
                "layers there will put out zeros, look whether the layer before is dead",
                stacklevel=4,
            )
        fresh = [full_name(path, name) for name in _unsettled(runner)]
        if fresh:
            warnings.warn(
                f"quant.convert: the running statistics of the batch norms {_some(fresh)} are mostly what they began "
                "with, so the int8 model will not be what was trained; train longer in training mode",
                stacklevel=4,
            )


def _collapsed(runner: TrainingRunner, slot: str) -> bool:
    try:
        return bool(runner.observer(slot).collapsed)
    except NoDataSeen:
        return False


def _unsettled(runner: TrainingRunner) -> list[str]:
    unsettled = []
    for name, norm in runner.root.named_modules():
        if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or norm.running_var is None:
            continue
        assert norm.num_batches_tracked is not None
        assert norm.running_mean is not None
        seen = int(norm.num_batches_tracked)
        if seen == 0:
            # A checkpoint may lack the count, so the values themselves are asked.
            began = bool((norm.running_mean == 0).all()) and bool((norm.running_var == 1).all())
        else:
            began = norm.momentum is not None and (1.0 - norm.momentum) ** seen > SETTLED
        if began:
            unsettled.append(name)
    return unsettled


def _some(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
