"""`quant export` and `quant run`: an int8 file for other programs, and a run of what the runner reads."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from quant.cli.errors import UserError, one_line, with_type

FORMAT_NAMES = ("onnx", "runner", "pt2", "pte")
"""The keys of `formats.FORMATS`, which imports torch."""

MOST_THREADS = 1024
"""Of one run, as in `octet-run`."""


def add_parsers(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The arguments of both."""
    export = verbs.add_parser("export", help="write an int8 model for another program")
    export.add_argument("file", metavar="FILE", help="what `quant dynamic`, `quant calibrate` or quant.save wrote")
    export.add_argument(
        "--model",
        required=True,
        metavar="PACKAGE.MODULE:FACTORY",
        help="a callable without arguments that returns the float model; the current folder is searched",
    )
    export.add_argument("--format", required=True, choices=FORMAT_NAMES, help="what is to be written")
    export.add_argument("--out", required=True, metavar="FILE", help="the file to write")
    export.add_argument(
        "--example",
        metavar="FILE.npy",
        action="append",
        default=[],
        help="an input, once for each: needed by pt2 and pte, and by models whose dynamic layers are all that is int8",
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


def export(options: argparse.Namespace, rest: list[str]) -> int:
    """Write the file in another format."""
    import quant
    from quant.cli import files
    from quant.cli.formats import FORMATS

    chosen = FORMATS[options.format]
    out, source = files.writable(Path(options.out), chosen.suffix), Path(options.file)
    if not source.is_file():
        raise UserError(f"there is no file {source}")
    example = tuple(files.read_array(name, "--example") for name in options.example) or None
    float_model = files.load_model(options.model, None).eval()
    # ArtefactError and ExportError are ValueErrors.
    try:
        report = chosen.write(quant.load(source, model=float_model), out, example)
    except (TypeError, ValueError, OSError, ImportError) as error:
        raise UserError(one_line(error)) from error
    except (LookupError, RuntimeError) as error:  # of the model's own forward, captured on the examples
        raise UserError(with_type(error)) from error
    size = out.stat().st_size
    if options.json:
        said = None if report is None else str(report)
        print(json.dumps({"file": str(out), "format": options.format, "bytes": size, "report": said}, indent=2))
        return 0
    if report is not None:
        print(report)
    print(f"wrote {out} ({size / 1024:.1f} KiB)")
    return 0


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """Run a file as `octet-run` does, with the kernels of this process."""
    import torch

    from quant.artefact.runner_file import read_runner_file
    from quant.cli import files

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
        model = read_runner_file(Path(options.file))
        inputs = [files.read_array(name, "--input") for name in options.input]
        outputs = model(inputs)
        taken = []
        for _ in range(options.repeat):
            begin = time.perf_counter()
            model(inputs)
            taken.append(1e3 * (time.perf_counter() - begin))
    except (TypeError, ValueError, IndexError, OSError) as error:
        raise UserError(one_line(error)) from error
    if len(outs) > len(outputs):
        raise UserError(f"--output is given {len(outs)} times, the model has {len(outputs)} outputs")
    _report(model.outputs, outputs, outs, taken, as_json=options.json)
    return 0


def _report(described: Any, outputs: list[Any], outs: list[Path], taken: list[float], *, as_json: bool) -> None:
    """Write the outputs that are asked for, and print all."""
    import numpy

    for path, value in zip(outs, outputs, strict=False):
        numpy.save(path, value.contiguous().numpy())
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
