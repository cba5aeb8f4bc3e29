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
        write: of a quantised model, a path, and example inputs or None. It raises ValueError or TypeError for a model
            that the format cannot hold.
    """

    suffix: str | None
    write: Callable[[nn.Module, Path, Any], object]


def _runner(model: nn.Module, path: Path, example_inputs: Any) -> None:
    import quant

    quant.save(model, path, runner=True, example_inputs=example_inputs)


def _by(name: str) -> Callable[[nn.Module, Path, Any], object]:
    """The writer of a format by the name that it has in the package, where this version has it."""

    def write(model: nn.Module, path: Path, example_inputs: Any) -> object:
        import quant

        exporter: Callable[..., object] | None = getattr(quant, name, None)
        if exporter is None:
            raise UserError(
                f"--format: this version has no quant.{name} yet; `--format runner` and, in Python, torch.export of "
                "the model are there"
            )
        return exporter(model, path)

    return write


FORMATS = {
    "runner": Format(None, _runner),
    "onnx": Format(".onnx", _by("export_onnx")),
    "pt2": Format(".pt2", _by("export_pt2")),
    "pte": Format(".pte", _by("export_pte")),
}
"""Name -> the format."""
