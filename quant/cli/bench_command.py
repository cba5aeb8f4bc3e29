"""`quant bench`: what calls of an int8 file cost here, beside the float model's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from quant.cli.arguments import add_model_arguments, positive
from quant.cli.errors import UserError, one_line, with_type


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The arguments."""
    parser = verbs.add_parser("bench", help="latency, memory, threads, and the time of each step, beside float")
    parser.add_argument("file", metavar="FILE", help="what `quant dynamic`, `quant calibrate` or quant.save wrote")
    add_model_arguments(parser, required=True)
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--example", metavar="FILE.npy", action="append", default=[], help="an input, once for each")
    inputs.add_argument(
        "--shape", metavar="SIZExSIZE", type=_shape, action="append", default=[],
        help="the shape of an input, as in 1x3x224x224, filled with normal noise; once for each input",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=positive, nargs="+", metavar="N", default=[], help="numbers of threads (default: torch's own)"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="for each model and number of threads (default: 2)"
    )
    parser.add_argument("--no-float", action="store_true", help="do not time the float model")
    parser.add_argument("--no-steps", action="store_true", help="do not time each step")
    parser.add_argument("--out", metavar="FILE.json", help="write every number there")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw where the time of a call goes")
    parser.add_argument("--json", action="store_true", help="print every number as JSON")


def bench(options: argparse.Namespace, rest: list[str]) -> int:
    """Print the tables, or with --json the numbers; write --out and --plot."""
    import quant
    from quant.cli import files

    outputs = files.writable_outputs(options, out=".json", plot=".svg")
    if options.plot is not None and options.no_steps:
        raise UserError("--plot draws the steps, and --no-steps leaves them out")
    source = Path(options.file)
    if not source.is_file():
        raise UserError(f"there is no file {source}")
    float_model = files.load_model(options.model, options.weights).eval()
    example = _example(options)
    # ArtefactError is a ValueError.
    try:
        model = quant.load(source, model=float_model)
        found = quant.benchmark(
            model,
            example,
            float_model=None if options.no_float else float_model,
            threads=options.threads,
            seconds=options.seconds,
            steps=not options.no_steps,
        )
    except (TypeError, ValueError, OSError) as error:
        raise UserError(one_line(error)) from error
    except (LookupError, RuntimeError) as error:  # of the model's own forward on this example
        raise UserError(with_type(error)) from error
    print(found.to_json() if options.json else found)
    if "out" in outputs:
        found.to_json(outputs["out"])
    if "plot" in outputs:
        found.plot(outputs["plot"])
    return files.say_written(options, outputs)


def _example(options: argparse.Namespace) -> tuple[Any, ...]:
    from quant.cli import files

    if options.example:
        return tuple(files.read_array(name, "--example") for name in options.example)
    import torch

    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in options.shape)


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(positive(size) for size in text.lower().split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 1x3x224x224") from error
