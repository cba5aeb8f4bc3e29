"""The arguments that several verbs have: the model, and from what those that quantise build their recipe."""

from __future__ import annotations

import argparse

MODEL_HELP = "a callable without arguments that returns the model, or the model itself; the current folder is searched"


def add_model_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """--model and --weights."""
    parser.add_argument("--model", required=required, metavar="PACKAGE.MODULE:FACTORY", help=MODEL_HELP)
    parser.add_argument(
        "--weights", metavar="FILE", help="the model's state dict: .safetensors, or .pt, .pth, .bin with tensors alone"
    )


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """--backend and --keep-float."""
    parser.add_argument("--backend", help="a backend that `quant doctor` lists (default: the fastest exact one)")
    parser.add_argument(
        "--keep-float",
        metavar="PATTERN",
        action="append",
        default=[],
        help="leave the modules of this name float; shell wildcards; may be repeated",
    )


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
