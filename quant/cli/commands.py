"""One function per command of `quant`. Each takes the parsed options and what the parser did not know, and returns the
exit status.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from quant.cli.bench_command import bench
from quant.cli.calibrate_command import calibrate
from quant.cli.errors import UserError
from quant.cli.export_command import export, run
from quant.cli.import_command import import_
from quant.cli.report_command import report
from quant.cli.search_commands import autoquant, sensitivity
from quant.cli.verify_command import verify


def dynamic(options: argparse.Namespace, rest: list[str]) -> int:
    """Quantise a model dynamically; print the report and, with --out, write what `quant.load` reads."""
    import quant
    from quant.cli import files

    out = None if options.out is None else files.writable(Path(options.out))
    model = files.load_model(options.model, options.weights)
    # NothingQuantized, RecipeError and BackendUnavailable are ValueErrors.
    try:
        recipe = quant.Recipe([(pattern, None) for pattern in options.keep_float], backend=options.backend)
        quantized = quant.quantize_dynamic(model, recipe, inplace=True)
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    report = quant.summary(quantized)
    if out is not None:
        files.save(quantized, out)
    _print_report(report, as_json=options.json)
    if out is not None and not options.json:
        print(f"wrote {out} ({out.stat().st_size / 1024:.1f} KiB)")
    return 0


def summary(options: argparse.Namespace, rest: list[str]) -> int:
    """Print the outcome of each module: of a file that `dynamic` or `calibrate` wrote, or of a model."""
    import quant
    from quant.cli import files

    if (options.file is None) == (options.model is None):
        raise UserError(
            "expected either a file that `quant dynamic --out` or `quant calibrate --out` wrote, or --model "
            "PACKAGE.MODULE:FACTORY"
        )
    if options.file is not None:
        if options.weights is not None:
            raise UserError("--weights goes with --model, not with a file that is already quantised")
        report = files.read_report(Path(options.file))
    else:
        report = quant.summary(files.load_model(options.model, options.weights))
    _print_report(report, as_json=options.json)
    return 0


def doctor(options: argparse.Namespace, rest: list[str]) -> int:
    """Print what int8 layers run on here."""
    from quant.cli import doctor

    findings = doctor.examine()
    print(json.dumps(findings, indent=2) if options.json else doctor.as_text(findings))
    return 0


def completion(options: argparse.Namespace, rest: list[str]) -> int:
    """Print a shell's completion script."""
    from quant.cli import make_parser
    from quant.cli.completion import script
    from quant.kernels.build import make_parser as make_build_parser

    text = script(options.shell, make_parser(), {"build": make_build_parser()})
    print(json.dumps({"shell": options.shell, "script": text}) if options.json else text, end="\n" * options.json)
    return 0


def build(options: argparse.Namespace, rest: list[str]) -> int:
    """Compile the kernels: `quant.kernels.build`, whose arguments these are."""
    from quant.kernels.build import main

    try:
        return 2 if main(rest) else 0
    except OSError as error:  # a compiler or a torch folder that was named and is not there
        raise UserError(str(error)) from error


__all__ = [
    "autoquant",
    "bench",
    "build",
    "calibrate",
    "completion",
    "doctor",
    "dynamic",
    "export",
    "import_",
    "report",
    "run",
    "sensitivity",
    "summary",
    "verify",
]


def _print_report(report: object, *, as_json: bool) -> None:
    from quant.report import Report

    assert isinstance(report, Report)
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)
