"""The command `quant calibrate`. The caller passes the functions that load, prepare, convert and save, since their
packages import this one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from quant.calibrate import distributed, ranges_file, readers, report
from quant.calibrate.batches import Caller
from quant.calibrate.driver import CHECKPOINT_SECONDS, run
from quant.calibrate.errors import DataError
from quant.observers import OBSERVERS
from torch import nn


@dataclass(frozen=True)
class Verbs:
    """The functions that the command calls besides calibration.

    Attributes:
        load_model: (--model, --weights) -> the float model.
        prepare: (model, example inputs, observer's name, its options) -> the model with observers.
        convert: prepared -> int8 model.
        save: (int8 model, path).
    """

    load_model: Callable[[str, str | None], nn.Module]
    prepare: Callable[[nn.Module, Any, str, dict[str, float]], nn.Module]
    convert: Callable[[nn.Module], nn.Module]
    save: Callable[[nn.Module, str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `quant calibrate`."""
    add_data_arguments(parser)
    parser.add_argument("--out", metavar="FILE", help="write the int8 model there; without it only ranges are printed")
    parser.add_argument("--save-ranges", metavar="FILE", help="write every range there, as JSON to look at and to edit")
    parser.add_argument(
        "--ranges",
        metavar="FILE",
        help="take the ranges of this file, which --save-ranges wrote, not those of the data",
    )
    parser.add_argument("--checkpoint", metavar="FILE", help="keep the state there, and go on from it after a kill")
    parser.add_argument(
        "--checkpoint-every",
        type=float,
        default=CHECKPOINT_SECONDS,
        metavar="SECONDS",
        help=f"default: {CHECKPOINT_SECONDS:g}",
    )
    parser.add_argument("--json", action="store_true", help="print ranges and warnings as JSON")


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the data, and how ranges are chosen: what every command that calibrates takes."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="PACKAGE.MODULE:FACTORY",
        help="a callable without arguments that returns the float model, or the model itself",
    )
    parser.add_argument("--weights", metavar="FILE", help="the float model's state dict, .safetensors or .pt")
    parser.add_argument(
        "--data",
        required=True,
        metavar="FOLDER|FILE|PACKAGE.MODULE:LOADER",
        help="a folder of images, a .npy, .npz or .csv file, or a callable that returns an iterable of batches",
    )
    parser.add_argument(
        "--observer",
        default="histogram",
        type=_observer,
        metavar="NAME",
        help="how ranges of activations are chosen (default: histogram): "
        f"{', '.join(name for name, kind in OBSERVERS.items() if not kind.by_hand)}, or one of an installed package",
    )
    parser.add_argument(
        "--observer-option",
        type=_option,
        metavar="NAME=NUMBER",
        action="append",
        default=[],
        help="of that observer, as in --observer percentile --observer-option percentile=99.9; may be repeated",
    )
    parser.add_argument("--limit", type=_positive, metavar="N", help="take N samples; of a loader, N batches")
    parser.add_argument("--batch-size", type=_positive, default=32, metavar="N", help="default: 32")
    parser.add_argument("--shuffle", action="store_true", help="take samples in a random order, before --limit")
    parser.add_argument("--seed", type=int, default=0, help="of that order (default: 0)")
    parser.add_argument(
        "--image-size",
        type=_size,
        metavar="S|HxW",
        help="resize images so that they cover this size, and take the middle",
    )
    parser.add_argument("--channels", type=int, choices=(1, 3), default=3, help="of images: 3, or 1 for grey")
    parser.add_argument("--scale", type=_number, help="factor for every value (default: 1/255 for images)")
    parser.add_argument("--mean", type=_numbers, metavar="M[,M...]", help="subtracted then, one or per channel")
    parser.add_argument("--std", type=_numbers, metavar="S[,S...]", help="divided by then, one or per channel")
    parser.add_argument("--fields", type=_names, metavar="NAME[,NAME]", help="arrays of an .npz, columns of a .csv")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def calibrate(options: argparse.Namespace, verbs: Verbs) -> int:
    """Load, prepare, calibrate, print the ranges and what is suspicious, and with --out convert and save.

    Under torchrun every process takes its share of the samples, and rank 0 prints and saves.

    Raises:
        CalibrationError, ValueError, TypeError: messages for the user, from every part.
    """
    with _process_group():
        rank, ranks = distributed.world()
        for option, path in (("--out", options.out), ("--save-ranges", options.save_ranges)):
            if path is not None and not Path(path).resolve().parent.is_dir():
                raise DataError(f"{option} {path}: there is no such folder")  # before the work, not after it
        if options.checkpoint is not None and Path(options.checkpoint).is_dir():
            raise DataError(f"--checkpoint {options.checkpoint}: this is a folder, name a file in it")
        model = verbs.load_model(options.model, options.weights)
        batches = read(options, (rank, ranks))
        inputs, batches = example(model, options, batches)
        prepared = verbs.prepare(model, inputs, options.observer, dict(options.observer_option))
        if options.ranges is not None:
            ranges_file.load_ranges(prepared, options.ranges)
        done = run(
            prepared,
            batches,
            progress=not options.quiet,
            checkpoint=options.checkpoint,
            checkpoint_every=options.checkpoint_every,
        )
        if rank != 0:
            return 0
        rows = report.ranges(prepared)
        if options.json:
            print(json.dumps({"run": asdict(done), "layers": [row.to_dict() for row in rows]}, indent=2))
        else:
            print(report.table(rows))
            for line in report.warnings_of(rows):
                print(f"warning: {line}", file=sys.stderr)
            samples = _counted(done.samples, "sample", "samples")
            print(f"{samples} in {_counted(done.batches, 'batch', 'batches')}, {done.seconds:.1f} s")
        if options.save_ranges is not None:
            ranges_file.save_ranges(prepared, options.save_ranges)
            if not options.json:
                print(f"wrote {options.save_ranges}")
        if options.out is not None:
            verbs.save(verbs.convert(prepared), options.out)
            if not options.json:
                print(f"wrote {options.out}")
        return 0


def read(options: argparse.Namespace, shard: tuple[int, int] = (0, 1)) -> Iterable[Any]:
    """The batches that the arguments ask for; this rank's share of them."""
    return readers.read(
        options.data,
        batch_size=options.batch_size,
        limit=options.limit,
        shuffle=options.shuffle,
        seed=options.seed,
        shard=shard,
        image_size=options.image_size,
        channels=options.channels,
        scale=options.scale,
        mean=options.mean,
        std=options.std,
        fields=options.fields,
    )


def example(model: nn.Module, options: argparse.Namespace, batches: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Inputs to prepare with, and the batches with none of them lost.

    Raises:
        DataError: there is no batch at all.
    """
    iterator = iter(batches)
    for first in iterator:
        return _inputs(model, first), _Peeked(first, iterator, batches)
    # A rank whose share is empty still prepares the model, with the first sample of all.
    for other in read(options):
        return _inputs(model, other), []
    raise DataError(f"--data {options.data}: it gave no batches")


class _Peeked:
    """An iterable with its first batch, which was read already, put back in front. Readable once."""

    def __init__(self, first: Any, rest: Iterator[Any], whole: Iterable[Any]) -> None:
        self.first, self.rest, self.whole = first, rest, whole

    def __iter__(self) -> Iterator[Any]:
        yield self.first
        yield from self.rest

    def __len__(self) -> int:
        return len(self.whole)  # type: ignore[arg-type]


def _inputs(model: nn.Module, batch: Any) -> Any:
    args, kwargs = Caller(model).arguments(batch)
    return kwargs or args


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """torchrun's processes as one gloo group, for as long as the command takes; nothing where there is one process."""
    dist = torch.distributed
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not dist.is_available() or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _number(text: str) -> float:
    """A decimal, or a fraction such as 1/255."""
    above, slash, below = text.partition("/")
    try:
        return float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error


def _observer(name: str) -> str:
    try:
        fits = name in OBSERVERS and not OBSERVERS[name].by_hand
    except ValueError as error:  # of an installed package, and not to be had
        raise argparse.ArgumentTypeError(str(error)) from error
    if not fits:
        known = ", ".join(one for one, kind in OBSERVERS.items() if not kind.by_hand)
        raise argparse.ArgumentTypeError(f"{name!r} is no observer that chooses a range from data, as {known} do")
    return name


def _option(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER, as in percentile=99.9")
    number = _number(value)
    return name, int(number) if number.is_integer() else number


def _numbers(text: str) -> list[float]:
    return [_number(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _size(text: str) -> int | tuple[int, int]:
    parts = text.lower().split("x")
    try:
        sizes = [int(part) for part in parts]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 224 or 192x256") from error
    if len(sizes) > 2 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 224 or 192x256")
    return sizes[0] if len(sizes) == 1 else (sizes[0], sizes[1])


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
