"""`quant report`: calibrate, convert, compare with float, and write the result as one HTML page."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

from quant.cli.calibrate_command import add_arguments, check_backend, check_ranges_files, try_once
from quant.cli.errors import UserError, one_line

COMPARED = 4
"""Batches to compare on: each runs four times, in float, in int8, and step by step in both."""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The arguments: those of `quant calibrate`, and a few."""
    parser = verbs.add_parser("report", help="calibrate, compare int8 with float, write one HTML page about it")
    add_arguments(parser)
    parser.set_defaults(out="report.html")
    parser.add_argument(
        "--compare",
        type=int,
        default=COMPARED,
        metavar="N",
        help=f"compare with float on the first N batches (default: {COMPARED})",
    )
    parser.add_argument(
        "--compare-data",
        metavar="FOLDER|FILE|PACKAGE.MODULE:LOADER",
        help="compare on other data than that of the ranges, read by the same options",
    )


def report(options: argparse.Namespace, rest: list[str]) -> int:
    """Write the page to --out; with --json print the comparison."""
    import quant
    from quant.calibrate import CalibrationError, CheckpointError, command, load_ranges, run, save_ranges
    from quant.calibrate.whole_files import replace_file
    from quant.cli import files

    out = files.writable(Path(options.out), ".html")
    check_ranges_files(options)
    if options.compare < 1:
        raise UserError(f"--compare is {options.compare}, expected at least 1 batch")
    model = files.load_model(options.model, options.weights).eval()
    if options.backend is not None:
        check_backend(options.backend)
    # RecipeError, NothingQuantized, NotCalibrated and DataError are ValueErrors.
    try:
        inputs, batches = command.example(model, options, command.read(options))
        try_once(model, inputs)
        settings = dict(options.observer_option)
        default = quant.QConfig(activation_observer=options.observer, activation_options=settings)
        recipe = quant.Recipe(
            [(pattern, None) for pattern in options.keep_float], default=default, backend=options.backend
        )
        prepared = quant.prepare(model, inputs, recipe)
        if options.ranges is not None:
            load_ranges(prepared, options.ranges)
        every = options.checkpoint_every
        run(prepared, batches, progress=not options.quiet, checkpoint=options.checkpoint, checkpoint_every=every)
        if options.save_ranges is not None:
            save_ranges(prepared, options.save_ranges)
        converted = quant.convert(prepared)
        options.data = options.compare_data or options.data
        comparison = quant.compare(model, converted, itertools.islice(command.read(options), options.compare))
        replace_file(out, quant.report_html(converted, comparison, prepared=prepared), "--out")
    except (CalibrationError, CheckpointError, TypeError, ValueError, OSError) as error:
        raise UserError(one_line(error)) from error
    print(json.dumps(comparison.to_dict(), indent=2) if options.json else comparison)
    if not options.json:
        print(f"wrote {out} ({out.stat().st_size / 1024:.1f} KiB)")
    return 0
