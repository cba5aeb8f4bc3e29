"""`quant calibrate`: ranges from a folder or file of data, and with --out a statically quantised model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.cli.arguments import add_recipe_arguments
from quant.cli.errors import UserError, one_line, with_type

if TYPE_CHECKING:
    from torch import nn


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The arguments of `quant calibrate`."""
    help = "run data through a model for its ranges, and make it int8 with them"
    add_arguments(verbs.add_parser("calibrate", help=help))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `quant.calibrate.command`, and those that the recipe is built from."""
    from quant.calibrate import command

    command.add_arguments(parser)
    add_recipe_arguments(parser)


def calibrate(options: argparse.Namespace, rest: list[str]) -> int:
    """Print the ranges and what is suspicious about them and, with --out, write what `quant.load` reads."""
    import quant
    from quant.calibrate import CalibrationError, command
    from quant.cli import files

    if options.out is not None:
        files.writable(Path(options.out), suffix=None)
    check_ranges_files(options)
    if options.backend is not None:
        check_backend(options.backend)

    def prepare(model: nn.Module, inputs: Any, observer: str, settings: dict[str, float]) -> nn.Module:
        try_once(model, inputs)
        default = quant.QConfig(activation_observer=observer, activation_options=settings)
        rules = [(pattern, None) for pattern in options.keep_float]
        return quant.prepare(model, inputs, quant.Recipe(rules, default=default, backend=options.backend))

    def save(model: nn.Module, path: str) -> None:
        files.save(model, Path(path))
        if not options.json:
            print("\n".join(str(quant.summary(model)).splitlines()[-2:]))  # of the whole model, and its packed weights

    verbs = command.Verbs(
        load_model=lambda name, weights: files.load_model(name, weights).eval(),
        prepare=prepare,
        convert=quant.convert,
        save=save,
    )
    # DataError, CheckpointError, NothingQuantized, NotCalibrated, RecipeError and ArtefactError are ValueErrors.
    try:
        return command.calibrate(options, verbs)
    except (CalibrationError, TypeError, ValueError, OSError) as error:
        raise UserError(one_line(error)) from error


def try_once(model: nn.Module, inputs: Any) -> None:
    """One plain run, so that an error for data that the model does not take is not taken for one of prepare."""
    import torch

    from quant.calibrate.batches import describe
    from quant.capture import as_arguments

    args, kwargs = as_arguments(inputs)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        raise UserError(f"the model fails on the first batch, {describe(inputs)}: {with_type(error)}") from error


def check_ranges_files(options: argparse.Namespace) -> None:
    """That --save-ranges can be written and --ranges is there, before the data is run."""
    from quant.cli import files

    if options.save_ranges is not None:
        files.writable(Path(options.save_ranges), suffix=None, option="--save-ranges")
    if options.ranges is not None and not Path(options.ranges).is_file():
        raise UserError(f"--ranges: there is no file {options.ranges}")


def check_backend(name: str) -> None:
    """Before the data is run, not after."""
    from quant.kernels import dispatch

    try:
        dispatch.find(name)
    except ValueError as error:
        raise UserError(f"--backend: {error}") from error
