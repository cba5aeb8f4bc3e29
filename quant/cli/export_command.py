"""`quant export` and `quant run`: an int8 file for other programs, and a run of what the runner reads."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from quant.cli.errors import UserError, one_line, with_type

if TYPE_CHECKING:
    from torch import Tensor, nn

FORMAT_NAMES = ("onnx", "runner", "pt2", "pte")
"""The keys of `formats.FORMATS`, which imports torch."""

RUNTIMES, TARGETS, FORMS = ("ort", "openvino", "tensorrt"), ("vnni", "avx2"), ("exact", "fast")
"""What `quant.export_onnx` takes, the default first."""

MOST_THREADS = 1024
"""Of one run, as in `octet-run`."""


def add_parsers(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The arguments of both."""
    export = verbs.add_parser("export", help="write an int8 model for another program")
    add_quantized_arguments(export)
    export.add_argument("--format", required=True, choices=FORMAT_NAMES, help="what is to be written")
    export.add_argument("--out", required=True, metavar="FILE", help="the file to write")
    add_example_argument(export, "needed by pt2 and pte, and by models whose dynamic layers are all that is int8")
    onnx = export.add_argument_group("of --format onnx")
    onnx.add_argument("--runtime", choices=RUNTIMES, help="which runtime the file is for (default: ort, ONNX Runtime)")
    onnx.add_argument(
        "--target",
        choices=TARGETS,
        help="processors with VNNI (the default), or without, on which int8 weights may overflow: avx2",
    )
    onnx.add_argument(
        "--recurrent",
        choices=FORMS,
        help="int8 recurrent layers by the model's own arithmetic (the default), or by the runtime's nearest operators",
    )
    onnx.add_argument(
        "--sums",
        choices=FORMS,
        help="sums of integers with the model's bits (the default), or as ONNX Runtime's QLinearAdd",
    )
    onnx.add_argument(
        "--verify",
        action="store_const",
        const=True,
        help="run the file beside the model, on --example or random inputs, and print what differs",
    )
    export.add_argument(
        "--json", action="store_true", help="print the file, its size and what the writer reports as JSON"
    )
    run = verbs.add_parser("run", help="run a file of `quant export --format runner` on arrays")
    run.add_argument("file", metavar="FILE", help="a file with a part for the runner")
    run.add_argument("--input", metavar="FILE.npy", action="append", default=[], help="once for each input, in order")
    run.add_argument("--output", metavar="FILE.npy", action="append", default=[], help="once for each output, in order")
    run.add_argument("--repeat", type=int, default=0, metavar="N", help="run N times more, and print the times")
    run.add_argument("--threads", type=int, metavar="N", help="threads of one run (default: torch's)")
    run.add_argument("--json", action="store_true", help="print the outputs' types and shapes, and the times, as JSON")


def add_quantized_arguments(parser: argparse.ArgumentParser) -> None:
    """The int8 file, and the float model that it is of."""
    parser.add_argument("file", metavar="FILE", help="what `quant dynamic`, `quant calibrate` or quant.save wrote")
    parser.add_argument(
        "--model",
        required=True,
        metavar="PACKAGE.MODULE:FACTORY",
        help="a callable without arguments that returns the float model; the current folder is searched",
    )


def add_example_argument(parser: argparse.ArgumentParser, why: str) -> None:
    """--example, and what for."""
    parser.add_argument(
        "--example", metavar="FILE.npy", action="append", default=[], help=f"an input, once for each: {why}"
    )


@contextlib.contextmanager
def quantized_model(options: argparse.Namespace) -> Iterator[tuple[nn.Module, tuple[Tensor, ...] | None]]:
    """The int8 model that the options name, and its example inputs; errors of what is done with them in one line."""
    import quant
    from quant.cli import files

    source = Path(options.file)
    if not source.is_file():
        raise UserError(f"there is no file {source}")
    example = tuple(files.read_array(name, "--example") for name in options.example) or None
    float_model = files.load_model(options.model, None).eval()
    # ArtefactError and ExportError are ValueErrors.
    try:
        yield quant.load(source, model=float_model), example
    except (TypeError, ValueError, OSError, ImportError) as error:
        raise UserError(one_line(error)) from error
    except (LookupError, RuntimeError) as error:  # of the model's own forward, captured on the examples
        raise UserError(with_type(error)) from error


def export(options: argparse.Namespace, rest: list[str]) -> int:
    """Write the file in another format."""
    from quant.cli import files
    from quant.cli.formats import FORMATS

    chosen = FORMATS[options.format]
    out, settings = files.writable(Path(options.out), chosen.suffix), _settings(options)
    with quantized_model(options) as (model, example):
        report = chosen.write(model, out, example, **settings)
    size = out.stat().st_size
    if options.json:
        said = None if report is None else report.to_dict()
        print(
            json.dumps(
                {"file": str(out), "format": options.format, "bytes": size, "report": said}, indent=2, allow_nan=False
            )
        )
        return 0
    if report is not None:
        print(report)
    print(f"wrote {out} ({size / 1024:.1f} KiB)")
    return 0


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options of the format that were given.

    Raises:
        UserError: one of another format was.
    """
    from quant.cli.formats import FORMATS

    own = FORMATS[options.format].settings
    given = {name: getattr(options, name) for one in FORMATS.values() for name in one.settings}
    given = {name: value for name, value in given.items() if value is not None}
    if other := next((name for name in given if name not in own), None):
        formats = [name for name, one in FORMATS.items() if other in one.settings]
        raise UserError(f"--{other} goes with --format {' or '.join(formats)}, not with {options.format}")
    return given


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """Run a file as `octet-run` does, with the kernels of this process."""
    import torch

    from quant.artefact.runner_file import read_runner_file
    from quant.cli import files
    from quant.export import PlannedModel

    outs = [files.writable(Path(name), ".npy", "--output") for name in options.output]
    if not Path(options.file).is_file():
        raise UserError(f"there is no file {options.file}")
    if options.repeat < 0:
        raise UserError(f"--repeat is {options.repeat}, expected at least 0")
    if options.threads is not None:
        if not 1 <= options.threads <= MOST_THREADS:
            raise UserError(f"--threads is {options.threads}, expected 1 to {MOST_THREADS}")
        torch.set_num_threads(options.threads)
    try:
        model = PlannedModel(read_runner_file(Path(options.file)))
        inputs = [files.read_array(name, "--input") for name in options.input]
        outputs = model.run(inputs)
        taken = []
        for _ in range(options.repeat):
            begin = time.perf_counter()
            model.run(inputs)
            taken.append(1e3 * (time.perf_counter() - begin))
    except (TypeError, ValueError, IndexError, OSError) as error:
        raise UserError(one_line(error)) from error
    if len(outs) > len(outputs):
        raise UserError(f"--output is given {len(outs)} times, the model has {len(outputs)} outputs")
    _report(model.plan.outputs, outputs, outs, taken, as_json=options.json)
    return 0


def _report(described: Any, outputs: list[Any], outs: list[Path], taken: list[float], *, as_json: bool) -> None:
    """Write the outputs that are asked for, and print all."""
    import numpy

    from quant.calibrate.whole_files import replace_file

    for path, value in zip(outs, outputs, strict=False):
        array = io.BytesIO()
        numpy.save(array, value.contiguous().numpy())
        try:
            replace_file(path, array.getvalue(), "--output")
        except OSError as error:
            raise UserError(one_line(error)) from error
    rows = [
        {"name": one.name, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        for one, value in zip(described, outputs, strict=True)
    ]
    if as_json:
        print(json.dumps({"outputs": rows, "milliseconds": taken}, indent=2))
        return
    for row in rows:
        print(f"output {row['name']} {row['dtype']} {tuple(row['shape'])}")
    if taken:
        print(f"{len(taken)} runs: median {median(taken):.3f} ms, least {min(taken):.3f} ms")
