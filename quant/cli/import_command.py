"""`quant import`: int8 models of other quantisers as files of this one, an ONNX file or a state dict of torch.ao."""

from __future__ import annotations

import argparse
from pathlib import Path

from quant.cli.errors import UserError, one_line, with_type


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The arguments."""
    parser = verbs.add_parser("import", help="an int8 model of another quantiser as a file of this one")
    parser.add_argument(
        "file",
        metavar="FILE",
        help="an ONNX file with QuantizeLinear and DequantizeLinear, which becomes a file for `quant run` and "
        "octet-run; or a .pt with the state dict of a model from torch.ao's quantize_dynamic, which becomes one for "
        "`quant.load`",
    )
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--model",
        metavar="PACKAGE.MODULE:FACTORY",
        help="for a state dict: a callable without arguments that returns the float model",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def import_(options: argparse.Namespace, rest: list[str]) -> int:
    """Write the file, and print what is in it."""
    import json

    from quant.cli import files

    source, out = Path(options.file), files.writable(Path(options.out), None)
    if not source.is_file():
        raise UserError(f"there is no file {source}")
    if source.suffix == ".onnx":
        if options.model is not None:
            raise UserError("--model goes with a state dict, not with an ONNX file, which has its own graph")
        report = _of_onnx(source, out)
    elif source.suffix in files.PICKLED:
        report = _of_torch_ao(source, out, options.model)
    else:
        raise UserError(f"{source.name} ends in {source.suffix!r}, expected .onnx, {', '.join(files.PICKLED)}")
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)  # type: ignore[attr-defined]
    if not options.json:
        print(f"wrote {out} ({out.stat().st_size / 1024:.1f} KiB)")
    return 0


def _of_onnx(source: Path, out: Path) -> object:
    import quant
    from quant.onnx.runner_file import save_for_runner

    try:  # ExportError is a ValueError
        return save_for_runner(quant.load_onnx(source), out)
    except (ValueError, OSError, ImportError) as error:
        raise UserError(one_line(error)) from error


def _of_torch_ao(source: Path, out: Path, factory: str | None) -> object:
    import quant
    from quant.cli import files

    if factory is None:
        raise UserError(
            "a state dict of torch.ao needs --model PACKAGE.MODULE:FACTORY, the float model that was quantised"
        )
    state, model = files.read_quantized(source), files.load_model(factory, None).eval()
    try:
        imported = quant.from_torch_ao(state, model)
    except (TypeError, ValueError) as error:
        raise UserError(one_line(error)) from error
    except (LookupError, RuntimeError) as error:
        raise UserError(with_type(error)) from error
    files.save(imported, out)
    return quant.summary(imported)
