"""Static quantisation in one call: prepare, calibrate and convert, for a model and some batches of its inputs."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from quant.calibrate import DataError, run
from quant.calibrate.batches import Arguments, Caller, check_batches, check_limit
from quant.calibrate.checkpoint import check_folder, observers_of
from quant.calibrate.driver import Forward
from quant.convert import convert
from quant.forward_state import keeping_children
from quant.prepare import check_model, prepare
from quant.recipe import Recipe
from quant.reconstruction import learn_rounding
from quant.rounding.methods import METHODS, NEAREST
from quant.runtime.arguments import parameters_of
from quant.smoothing.smooth import Smoothed, smoothed_model, some_batches
from quant.static.prepared import record_of


@torch.inference_mode(False)
def quantize_static(
    model: nn.Module,
    batches: Iterable[Any],
    recipe: Recipe | None = None,
    backend: str | None = None,
    *,
    forward: Forward | None = None,
    example_inputs: Any = None,
    limit: int | None = None,
    rounding: str = NEAREST,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
    smooth: bool = True,
) -> nn.Module:
    """The int8 form of a float model, its activation ranges taken from `batches`.

    Args:
        model: any module, unedited; left as it is.
        batches: tensors, tuples or dicts of float inputs; a DataLoader, a list, a generator. Labels are left out, by
            the rule of `calibrate/batches.py`. Some hundred samples are enough.
        recipe: which layers are quantised and how; None quantises everything that has an int8 kernel.
        backend: a name of `quant.kernels.available()`, or None for the fastest that is exact here.
        forward: called with (model, batch) where the model is not simply called with its inputs.
        example_inputs: what the model is captured with, as in `prepare`; None takes those of its first call.
        limit: batches to take at most.
        rounding: how weights become integers: "nearest"; or, by what they do to the model's outputs on the data,
            "gptq" (seconds) or "adaround" (minutes), as `quant.learn_rounding` does with its defaults. Of 4 bits and
            fewer it decides whether a model is of use; of 8 bits it gains little.
        checkpoint: as for `quant.learn_rounding`.
        progress: a bar on standard error, two lines where that is no terminal.
        smooth: look at what linear layers and convolutions get for the first batches, and, where the measured error of
            their outputs says so, scale outlier channels into the weights (Xiao et al. 2022, arXiv:2211.10438) or
            give a layer 16-bit activations. The report says where, with the error before and after.

    Raises:
        DataError: there are no batches, or `forward` never calls the model.
        NothingQuantized, RecipeError: as `prepare`.
        ValueError: `rounding` is none of these, or a checkpoint has no use.
        NotCalibrated: the batches never reach some layer that is to be quantised; all are listed.
    """
    check_batches(batches, "quant.quantize_static")
    check_limit(limit, "quant.quantize_static")
    if rounding not in (NEAREST, *METHODS):
        legal = ", ".join(map(repr, (NEAREST, *METHODS)))
        raise ValueError(f"quant.quantize_static: rounding is {rounding!r}, expected one of {legal}")
    if checkpoint is not None and rounding == NEAREST:
        raise ValueError(
            "quant.quantize_static: checkpoint keeps what rounding='gptq' or 'adaround' learned; rounding to nearest "
            "learns nothing"
        )
    check_folder(checkpoint, "quant.quantize_static")
    if rounding != NEAREST:
        batches = list(itertools.islice(batches, limit))  # gone through twice
    if example_inputs is None:
        example_inputs, batches = _example(model, batches, forward)
    check_model(model, "quant.quantize_static")
    smoothed = Smoothed(model, recipe or Recipe())
    if smooth and isinstance(smoothed.recipe, Recipe):  # `prepare` words the error
        some, batches = some_batches(batches, limit)
        smoothed = smoothed_model(model, some, smoothed.recipe, forward)
    prepared = prepare(smoothed.model, example_inputs, smoothed.recipe)
    record_of(prepared).measured = smoothed.notes
    with keeping_children(prepared):
        if observers_of(prepared):  # a model of dynamic layers alone has none
            run(prepared, batches, forward=forward, limit=limit, progress=progress)
        if rounding != NEAREST:
            learn_rounding(prepared, batches, rounding, forward=forward, checkpoint=checkpoint, progress=progress)
    return convert(prepared, backend)


def _example(model: nn.Module, batches: Iterable[Any], forward: Forward | None) -> tuple[Any, Iterable[Any]]:
    """The inputs of the model's first call, and the batches with none of them lost."""
    some, batches = some_batches(batches, 1)
    for first in list(some):
        args, kwargs = Caller(model).arguments(first) if forward is None else _called_with(model, first, forward)
        return as_example(model, args, kwargs), batches
    raise DataError("quant.quantize_static: there are no batches; give some hundred samples of real inputs")


def as_example(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call as one example: those of one kind, or a dict where each has a name."""
    if not (args and kwargs):
        return kwargs or args
    parameters = parameters_of(model)
    names = [one.name for one in itertools.takewhile(_has_name, parameters)]
    if len(args) <= len(names):
        return {**dict(zip(names, args, strict=False)), **kwargs}
    return inspect.Signature(parameters).bind(*args, **kwargs)


def _has_name(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.POSITIONAL_OR_KEYWORD


class _Called(Exception):
    """Ends a forward of the user's at its first call of the model."""


def _called_with(model: nn.Module, batch: Any, forward: Forward) -> Arguments:
    """The arguments that the user's `forward` gives to the model."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Called(args, kwargs)

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            forward(model, batch)
    except _Called as call:
        args, kwargs = call.args
        return args, kwargs
    finally:
        hook.remove()
    raise DataError(
        "quant.quantize_static: forward(model, batch) did not call model(...); give example_inputs=, a tensor, a tuple "
        "of positional arguments or a dict of keyword arguments"
    )
