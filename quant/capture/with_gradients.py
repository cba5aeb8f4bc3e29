"""Compares a recording with the same call in training mode and with gradients."""

from __future__ import annotations

import torch
from torch import nn

from quant.capture.differences import difference, needs_alike, problem_of
from quant.capture.forward_code import asks_for_gradients
from quant.capture.proof import run
from quant.capture.random_draws import seed
from quant.capture.recorded_modules import Watched
from quant.capture.recorder import Recorder
from quant.capture.trained_norms import settle_mode
from quant.capture.unlike_in_training import LARGER, NEVER_TRAINED, called_layers, larger_layers
from quant.runtime.arguments import Arguments
from quant.runtime.names import full_name

TRIALS = 8
"""Calls in training mode tried to see each layer at least once, where training skips layers by chance: a layer that is
skipped half of the time is missed in one of two hundred cases."""


def unlike_in_training(watched: Watched, recorder: Recorder, call: Arguments) -> dict[str, str]:
    """The modules that behave differently in training mode with gradients than was recorded in eval mode.

    A call with `training=False` in both keeps it in training.
    """
    other = _recorded_in_training(watched, recorder, call)
    if other is None:
        return {}
    settle_mode(recorder, other)
    return _unlike(recorder, other, "other values", "training")


def note_unlike_layers(watched: Watched, recorder: Recorder, call: Arguments) -> None:
    """Note in `watched` the layers whose ranges from training do not fit eval mode, because a module differs there."""
    for name, reason in _unlike_layers(watched, recorder, call).items():
        watched.unlike_in_training.setdefault(full_name(recorder.path, name), reason)


def _unlike_layers(watched: Watched, recorder: Recorder, call: Arguments) -> dict[str, str]:
    """Layer whose ranges from training do not fit eval mode -> the reason, by recordings that keep all values.

    A layer that training skips, or gives smaller values, only by chance is tried under other seeds.
    """
    before = watched.snapshot()
    one = recorder.again(before, training=recorder.training, keeps=True)
    try:
        run(watched, one, call)
    finally:
        before.put_back()
    larger = missing = called_layers(one)
    for number in range(TRIALS):
        seed(number)
        other = _recorded_in_training(watched, recorder, call, keeps=True, batch_statistics=False)
        if other is None:
            return {}
        settle_mode(one, other)
        larger, missing = larger.intersection(larger_layers(one, other)), missing - called_layers(other)
        other.forget_values()
        if not larger | missing:
            break
    one.forget_values()
    before.put_back()
    return {**dict.fromkeys(sorted(larger), LARGER), **dict.fromkeys(sorted(missing), NEVER_TRAINED)}


def _recorded_in_training(
    watched: Watched, recorder: Recorder, call: Arguments, *, keeps: bool = False, batch_statistics: bool = True
) -> Recorder | None:
    """Record the same call in training mode; None where the module refuses it.

    Args:
        batch_statistics: whether batch norms are in training mode too. Their running statistics approach those of the
            batches in the course of training, but those of an untrained model do not, and scale all later values.
    """
    modes = {module: module.training for module in recorder.root.modules()}
    try:
        for module in modes:
            module.training = batch_statistics or not isinstance(module, nn.modules.batchnorm._BatchNorm)
        return _recorded_with_gradients(watched, recorder, call, training=True, keeps=keeps)
    finally:
        for module, mode in modes.items():
            module.training = mode


def unlike_with_gradients(watched: Watched, recorder: Recorder, call: Arguments) -> dict[str, str]:
    """The module that behaves differently with gradients; tried only where a forward asks whether they are enabled."""
    if not asks_for_gradients(recorder.root):
        return {}
    other = _recorded_with_gradients(watched, recorder, call, training=False)
    return {} if other is None else _unlike(recorder, other, "for other values", "with gradients")


def _recorded_with_gradients(
    watched: Watched, recorder: Recorder, call: Arguments, *, training: bool, keeps: bool = False
) -> Recorder | None:
    """Record the same call with gradients; None where the module refuses it."""
    before = watched.snapshot()
    other = recorder.again(before, training=training, keeps=keeps)
    try:
        with torch.enable_grad():
            run(watched, other, call)
    except (
        Exception
    ):  # batch norms refuse a single value per channel, for one; what refuses gradients is called without
        return None
    finally:
        before.put_back()
    if not keeps:
        other.forget_values()
    return other


def _unlike(recorder: Recorder, other: Recorder, usual: str, here: str) -> dict[str, str]:
    """The module that behaves differently in the other recording; calls whose values are not read do not count.

    Args:
        usual, here: words of the reason, and their replacement.
    """
    fault = problem_of(recorder, other) or difference(recorder, other)
    if fault is None or (not other.problems and needs_alike(recorder, other)):
        return {}
    return {full_name(recorder.path, fault[0]): f"its forward {fault[1].replace(usual, here)}"}
