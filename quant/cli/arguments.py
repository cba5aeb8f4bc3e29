"""The arguments from which every verb that quantises builds its recipe."""

from __future__ import annotations

import argparse


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
