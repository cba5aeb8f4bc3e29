"""The formats that `quant export` writes: one table, with a function of the package for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from quant.cli.errors import UserError


@dataclass(frozen=True)
class Format:
    """A format of files for other programs.

    Attributes:
        suffix: of its files; None takes any.
        write: of a quantised model, a path, example inputs or None, and the settings. It gives a report with a
            `to_dict`, or None, and raises ValueError or TypeError for a model that the format cannot hold.
        settings: options of the command that this format alone has.
    """

    suffix: str | None
    write: Callable[..., Any]
    settings: tuple[str, ...] = ()


def _runner(model: nn.Module, path: Path, example_inputs: Any) -> None:
    import quant

    quant.save(model, path, runner=True, example_inputs=example_inputs)


def _onnx(model: nn.Module, path: Path, example_inputs: Any, *, verify: bool = False, **settings: str) -> object:
    """`quant.export_onnx`; verified on the examples, where there are some."""
    import quant

    call = example_inputs if verify and example_inputs is not None else verify
    return quant.export_onnx(model, path, example_inputs=example_inputs, verify=call, **settings)


def _pt2(model: nn.Module, path: Path, example_inputs: Any) -> None:
    """What `torch.export.load` reads; sizes stay free where the model lets them, but for those that are 1."""
    import torch

    inputs = _needed(example_inputs, "pt2")
    with torch.inference_mode():
        model(*inputs)  # says what is wrong with an input better than a trace
    free = tuple(dict.fromkeys(range(one.dim()), torch.export.Dim.AUTO) for one in inputs)
    with torch.no_grad():
        torch.export.save(torch.export.export(model, inputs, dynamic_shapes=free, strict=False), path)


def _pte(model: nn.Module, path: Path, example_inputs: Any) -> object:
    import quant

    return quant.export_executorch(model, path, _needed(example_inputs, "pte"))


def _needed(example_inputs: Any, name: str) -> Any:
    if example_inputs is None:
        raise UserError(f"--format {name} needs --example FILE.npy, once for each input: torch.export traces a call")
    return example_inputs


FORMATS = {
    "runner": Format(None, _runner),
    "onnx": Format(".onnx", _onnx, ("runtime", "target", "recurrent", "sums", "verify")),
    "pt2": Format(".pt2", _pt2),
    "pte": Format(".pte", _pte),
}
"""Name -> the format."""
