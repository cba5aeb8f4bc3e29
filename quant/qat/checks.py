"""Mistakes that training would hide or meet late: parameters nobody trains, empty ranges, unsettled statistics."""

from __future__ import annotations

import warnings
from collections.abc import Set

import torch
from torch import nn

from quant.kernels.scheme import SCALE_MIN
from quant.observers import NoDataSeen
from quant.qat.runner import TrainingRunner
from quant.qat.switches import fake_quantizers
from quant.runtime.names import full_name
from quant.runtime.programs import RESERVED
from quant.static.runner import runners

SETTLED = 0.1
"""The share that a batch norm's first values (0 and 1) may still have in its running statistics at convert."""


def check_optimizer(prepared: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of parameters that require a gradient and are not in the optimiser.

    Warns:
        UserWarning: there are such parameters; the message names them. An optimiser built before `prepare_qat` has the
            float model's parameters, and would train nothing here.
    """
    lost = _not_held(prepared, optimizer)
    if lost:
        warnings.warn(
            f"the optimiser does not hold {len(lost)} parameters that require a gradient: {_some(lost)}; give it the "
            "parameters of the model that prepare_qat returned, or set requires_grad to False",
            stacklevel=2,
        )
    return lost


def check_new_parameters(prepared: nn.Module, optimizer: torch.optim.Optimizer, new: Set[int]) -> None:
    """Warn of learned ranges that a call of another kind brought in training, and that the optimiser does not hold.

    Args:
        new: ids of the parameters that the model did not have before.

    Warns:
        UserWarning: there are such parameters; the message names them.
    """
    brought = {name for name, one in prepared.named_parameters() if id(one) in new and RESERVED in name.split(".")}
    lost = [name for name in _not_held(prepared, optimizer) if name in brought]
    if lost:
        warnings.warn(
            f"a call of another kind brought {len(lost)} learned ranges that the optimiser does not hold, so that they "
            f"stay as they began: {_some(lost)}; give inputs of such calls to prepare_qat as examples=[...], or add "
            'them by optimizer.add_param_group({"params": [...]})',
            stacklevel=4,
        )


def _not_held(prepared: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name, one in prepared.named_parameters() if one.requires_grad and id(one) not in held]


def check_gradients(wrapped: nn.Module) -> None:
    """Refuse a DistributedDataParallel that expects a gradient of every parameter where learned ranges have none.

    They have none before rounding and once they are frozen: DDP would stop in the step after, with most of the training
    done.

    Raises:
        ValueError: there are learned ranges, and DDP was not asked to look for parameters without a gradient.
    """
    if not isinstance(wrapped, nn.parallel.DistributedDataParallel) or wrapped.find_unused_parameters:
        return
    learned = [name for one in fake_quantizers(wrapped) for name, _ in one.named_parameters(prefix=one.name)]
    if learned:
        raise ValueError(
            f"{len(learned)} learned ranges, '{learned[0]}' among them, get no gradient before rounding and once they "
            "are frozen; pass find_unused_parameters=True to DistributedDataParallel (to Lightning's Trainer "
            "strategy='ddp_find_unused_parameters_true')"
        )


def check_trained(prepared: nn.Module) -> None:
    """Warn of conditions that make a trained model's integers wrong; called by convert.

    Warns:
        UserWarning: values were only observed and never rounded; a range is empty, so that a layer returns zeros; or
            the running statistics of a batch norm, which the int8 model uses, are still near their initial values.
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
        # A layer that other calls have shown values to has their range here, and a bias.
        return bool(runner.observer(slot).collapsed) and float(runner.qparams(slot).scale.max()) <= SCALE_MIN
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
            # A checkpoint may lack the count, so the values themselves are checked.
            began = bool((norm.running_mean == 0).all()) and bool((norm.running_var == 1).all())
        else:
            began = norm.momentum is not None and (1.0 - norm.momentum) ** seen > SETTLED
        if began:
            unsettled.append(name)
    return unsettled


def _some(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
