"""`quant verify`: an ONNX file that `quant export` wrote, beside the int8 model as it is now."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from quant.cli.errors import UserError
from quant.cli.export_command import add_example_argument, add_quantized_arguments, quantized_model


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The arguments."""
    parser = verbs.add_parser("verify", help="run an exported ONNX file beside the int8 model, value by value")
    add_quantized_arguments(parser)
    parser.add_argument("exported", metavar="FILE.onnx", help="what `quant export --format onnx` wrote of it")
    add_example_argument(
        parser,
        "what both are run on (default: random inputs); needed by models whose dynamic layers are all that is int8",
    )
    parser.add_argument(
        "--max-error",
        type=_bound,
        metavar="E",
        help="fail where an output's relative error (L2) against the model's is larger, as 0.002",
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def _bound(text: str) -> float:
    """A number from 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text}, expected a number from 0 on")
    return number


def verify(options: argparse.Namespace, rest: list[str]) -> int:
    """Print how the file's values compare with the model's."""
    from quant.onnx import verify_onnx

    if not Path(options.exported).is_file():
        raise UserError(f"there is no file {options.exported}")
    with quantized_model(options) as (model, example):
        found = verify_onnx(model, Path(options.exported), example, example_inputs=example)
    print(json.dumps(found.to_dict(), indent=2, allow_nan=False) if options.json else found)
    name, worst = max(found.outputs.items(), key=lambda one: (math.isnan(one[1]), one[1]), default=("", 0.0))
    if options.max_error is not None and not worst <= options.max_error:
        raise UserError(
            f"output {name} of {options.exported} in {found.ran_in} is {worst:.2g} from the model's, relative, more "
            f"than --max-error {options.max_error:g}; the report says in which steps"
        )
    return 0
