"""Reads the runner's part of a file, and runs it with the kernels of this process: `octet-run` in Python."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from quant.artefact.file import MANIFEST, ArtefactError
from quant.artefact.runner_document import DOCUMENT, VERSION
from quant.artefact.tensor_bytes import tensor_bytes
from quant.export.whole_plan import DTYPES
from quant.kernels import dispatch, ops


@dataclass(frozen=True)
class RunnerModel:
    """A model as a plan.

    Attributes:
        plan: its text, and the tensors that this names.
        inputs, outputs: (name, dtype, shape at export) of each.
    """

    plan: str
    constants: tuple[Tensor, ...]
    inputs: tuple[tuple[str, torch.dtype, Any], ...]
    outputs: tuple[tuple[str, torch.dtype, Any], ...]

    def __call__(self, inputs: Sequence[Tensor], backend: str = "") -> list[Tensor]:
        """The outputs.

        Raises:
            TypeError, ValueError, IndexError: an input has another dtype, shape or range than the model takes.
        """
        if len(inputs) != len(self.inputs):
            raise ValueError(f"the model has {len(self.inputs)} inputs, got {len(inputs)}")
        for x, (name, dtype, _) in zip(inputs, self.inputs, strict=True):
            if x.dtype != dtype:
                raise TypeError(f"input '{name}' is {_said(x.dtype)}, expected {_said(dtype)}")
        ops.extension_problem()  # which loads the kernels
        bytes_of = [x.view(torch.uint8) if x.dtype == torch.bool else x for x in inputs]
        backend = backend or dispatch.current(None).name
        outputs: list[Tensor] = torch.ops.octet.run_plan_of_finite(bytes_of, list(self.constants), self.plan, backend)
        if not outputs and self.outputs:
            raise ValueError("NaN or inf came to where a value is rounded to an integer")
        if len(outputs) != len(self.outputs):
            raise ValueError(f"the plan gives {len(outputs)} outputs, and its file names {len(self.outputs)}")
        return outputs


def read_runner_file(path: Path) -> RunnerModel:
    """The runner's part of a file.

    Raises:
        ArtefactError: the file is not from `quant.save`, has no such part, is altered, damaged or of a newer version.
        OSError: it cannot be read.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return _model(file, path)
    except safetensors.SafetensorError as error:
        raise ArtefactError(f"{path} is no safetensors file, or it was cut: {error}") from error
    except ArtefactError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ArtefactError(f"{path}: its part for the runner was altered or damaged ({reason})") from error


def _model(file: Any, path: Path) -> RunnerModel:
    document = _document(file.metadata() or {}, path)
    constants = tuple(_constant(file, entry, path) for entry in document["constants"])
    inputs, outputs = (tuple(map(_value, document[name])) for name in ("inputs", "outputs"))
    return RunnerModel(_text(document["plan"]), constants, inputs, outputs)


def _document(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    if MANIFEST not in metadata:
        raise ArtefactError(f"{path} is a file that quant.save did not write")
    text = metadata.get(DOCUMENT)
    if text is None:
        raise ArtefactError(
            f"{path} has no part for the runner: write it by `quant export --format runner`, or by quant.save(model, "
            "path, runner=True)"
        )
    if metadata.get(f"{DOCUMENT}_crc32") != str(zlib.crc32(text.encode())):
        raise ArtefactError(f"{path} was altered or damaged: the runner's part does not match its checksum")
    document: dict[str, Any] = json.loads(text)
    if not 1 <= document["version"] <= VERSION:
        raise ArtefactError(
            f"{path}: its part for the runner has version {document['version']} ({document['writer']}), this library "
            f"reads up to {VERSION}: upgrade it"
        )
    return document


def _constant(file: Any, entry: dict[str, Any], path: Path) -> Tensor:
    tensor: Tensor = file.get_tensor(entry["tensor"])
    if zlib.crc32(tensor_bytes(tensor)) != entry["crc32"]:
        raise ArtefactError(f"{path} was altered or damaged: tensor {entry['tensor']!r} does not match its checksum")
    return tensor


def _value(entry: dict[str, Any]) -> tuple[str, torch.dtype, Any]:
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    return _text(entry["name"]), dtypes[entry["dtype"]], entry["shape"]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
