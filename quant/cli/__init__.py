"""The command line `quant`: the verbs of the package for somebody with a model factory and a file of weights.

    quant dynamic --model package.module:factory --weights model.safetensors --out int8.safetensors
    quant calibrate --model package.module:factory --data photos/ --out model.q8
    quant summary int8.safetensors
    quant report --model package.module:factory --data photos/ --out report.html
    quant sensitivity --model package.module:factory --data photos/ --metric package.module:accuracy
    quant autoquant --model package.module:factory --data photos/ --metric package.module:accuracy --max-drop 0.005
    quant bench model.q8 --model package.module:factory --shape 1x3x224x224
    quant export model.q8 --model package.module:factory --format runner --out runner.q8
    quant run runner.q8 --input image.npy --output classes.npy
    quant verify model.q8 model.onnx --model package.module:factory
    quant import int8.onnx --out runner.q8
    quant doctor

Arguments and errors are handled here; `commands.py` does the work. Exit status: 0; 2 with one line on standard error
that says what was wrong and the way out; 1 where `quant build` does not compile, or with a traceback at a fault of
ours; 130 after Ctrl-C. Nothing is imported before it is needed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence

import quant
from quant.cli import (
    bench_command,
    calibrate_command,
    export_command,
    import_command,
    report_command,
    search_commands,
    verify_command,
)
from quant.cli.arguments import add_model_arguments, add_recipe_arguments
from quant.cli.completion import SHELLS
from quant.cli.errors import UserError, is_out_of_memory, one_line

INTERRUPTED = 130
"""The exit status after Ctrl-C, as a shell gives it to a program that SIGINT ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = make_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "build":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"quant: warning: {message}", file=sys.stderr)
        try:
            return _command(options.command)(options, rest)
        except UserError as error:
            print(f"quant {options.command}: {error}", file=sys.stderr)
            return 2
        except BrokenPipeError:  # the reader, `head` say, has seen enough
            sys.stderr.close()
            return 0
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            way = "smaller batches, or fewer at a time, take less"
            print(f"quant {options.command}: out of memory: {one_line(error)}; {way}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"\nquant {options.command}: interrupted", file=sys.stderr)
            return INTERRUPTED


def _command(name: str) -> Callable[[argparse.Namespace, list[str]], int]:
    from quant.cli import commands

    words = {"import": "import_"}  # which Python keeps for itself
    command: Callable[[argparse.Namespace, list[str]], int] = getattr(commands, words.get(name, name))
    return command


def make_parser() -> argparse.ArgumentParser:
    """The arguments of every command but `build`, which has a parser of its own."""
    parser = argparse.ArgumentParser(prog="quant", description="Int8 for PyTorch models on CPUs.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"octet-quant {quant.__version__}")
    verbs = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    dynamic = verbs.add_parser("dynamic", help="make a model's weights int8, ranges of activations at run time")
    add_model_arguments(dynamic, required=True)
    dynamic.add_argument("--out", metavar="FILE.safetensors", help="write the quantised model there, for `quant.load`")
    add_recipe_arguments(dynamic)
    dynamic.add_argument("--json", action="store_true", help="print the report as JSON")

    summary = verbs.add_parser("summary", help="what became of each module, and why")
    summary.add_argument(
        "file", nargs="?", metavar="FILE", help="a file that `quant dynamic` or `quant calibrate` wrote"
    )
    add_model_arguments(summary, required=False)
    summary.add_argument("--json", action="store_true", help="print the report as JSON")

    calibrate_command.add_parser(verbs)
    report_command.add_parser(verbs)
    search_commands.add_parsers(verbs)
    bench_command.add_parser(verbs)
    export_command.add_parsers(verbs)
    verify_command.add_parser(verbs)
    import_command.add_parser(verbs)

    doctor = verbs.add_parser("doctor", help="CPU, torch, the compiled kernels, and why a backend is missing")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")

    completion = verbs.add_parser("completion", help="a script that completes these commands in a shell")
    completion.add_argument("shell", choices=SHELLS, help="the shell that reads it")
    completion.add_argument("--json", action="store_true", help="print the script as JSON")

    verbs.add_parser("build", help="compile the kernels for the torch installed here", add_help=False)
    return parser
