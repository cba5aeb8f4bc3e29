"""Reads the runner's part of a file, and runs it with the kernels of this process: `octet-run` in Python."""

from __future__ import annotations

import json
import re
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
from quant.export.whole_plan import DTYPES, PlanValue
from quant.kernels import dispatch, ops


@dataclass(frozen=True)
class RunnerModel:
    """A model as a plan.

    Attributes:
        plan, constants: its text, and the tensors that this names.
        steps: the name of the user's step of each operation of the text.
    """

    plan: str
    steps: tuple[str, ...]
    constants: tuple[Tensor, ...]
    inputs: tuple[PlanValue, ...]
    outputs: tuple[PlanValue, ...]

    def __call__(self, inputs: Sequence[Tensor], backend: str = "") -> list[Tensor]:
        """The outputs.

        Raises:
            TypeError, ValueError, IndexError: an input has another dtype, shape or range than the model takes. The
                message names the input, or the layer that refuses it.
        """
        if len(inputs) != len(self.inputs):
            raise ValueError(f"the model has {len(self.inputs)} inputs, got {len(inputs)}")
        for x, expected in zip(inputs, self.inputs, strict=True):
            _check(x, expected)
        ops.extension_problem()  # which loads the kernels
        bytes_of = [x.view(torch.uint8) if x.dtype == torch.bool else x for x in inputs]
        backend = backend or dispatch.current(None).name
        try:
            outputs: list[Tensor] = torch.ops.octet.run_plan_of_finite(
                bytes_of, list(self.constants), self.plan, backend
            )
        except (ValueError, IndexError) as error:
            raise type(error)(self._explained(str(error), inputs)) from error
        if not outputs and self.outputs:
            raise ValueError("NaN or inf came to where a value is rounded to an integer")
        return outputs

    def _explained(self, error: str, inputs: Sequence[Tensor]) -> str:
        """An error of the plan with its layer's name, and with the inputs that are unlike those at export."""
        quoted = re.search(r"plan line '%(\d+) = ", error)
        lines = [line.partition(" = ")[0] for line in self.plan.split("\n")[2:-1]]
        if quoted is not None and f"%{quoted[1]}" in lines:
            error = f"layer '{self.steps[lines.index(f'%{quoted[1]}')]}': {error[quoted.start() :]}"
        unlike = (_unlike(x, expected) for x, expected in zip(inputs, self.inputs, strict=True))
        return "; ".join([error, *filter(None, unlike)])


def _check(x: Tensor, expected: PlanValue) -> None:
    dtype = DTYPES.get(x.dtype, _said(x.dtype))
    if dtype != expected.dtype:
        raise TypeError(f"input '{expected.name}' is {dtype}, expected {expected.dtype}")
    if expected.fixed_rank and expected.shape is not None and x.dim() != len(expected.shape):
        raise ValueError(f"input '{expected.name}' has {x.dim()} dimensions, expected {len(expected.shape)}")


def _unlike(x: Tensor, expected: PlanValue) -> str:
    """How an input differs from what it was at export, where it does in more than sizes that are free; else ''."""
    if expected.shape is None:
        return ""
    known = [size if isinstance(size, int) else None for size in expected.shape]
    if len(known) == x.dim() and all(size in (None, own) for size, own in zip(known, x.shape, strict=True)):
        return ""
    sizes = ", ".join("any" if size is None else str(size) for size in known)
    return f"input '{expected.name}' is ({', '.join(map(str, x.shape))}), at export it was ({sizes})"


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
    plan, steps = _text(document["plan"]), tuple(map(_text, document["steps"]))
    constants = tuple(_constant(file, entry, path) for entry in document["constants"])
    inputs, outputs = (tuple(map(_value, document[name])) for name in ("inputs", "outputs"))
    _, reads, *operations, gives = plan.split("\n")
    if len(steps) != len(operations):
        raise ValueError(f"there are {len(steps)} names for {len(operations)} operations")
    counts = len(reads.split()) - 1, len(gives.split()) - 1
    if counts != (len(inputs), len(outputs)):
        raise ValueError(
            f"its plan has {counts[0]} inputs and {counts[1]} outputs, expected {len(inputs)} and {len(outputs)}"
        )
    return RunnerModel(plan, steps, constants, inputs, outputs)


def _document(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    if MANIFEST not in metadata:
        raise ArtefactError(f"{path} is a safetensors file that quant.save did not write")
    text = metadata.get(DOCUMENT)
    if text is None:
        raise ArtefactError(
            f"{path} has no part for the runner: write it by quant.save(model, path, runner=True), or by "
            "`quant export --format runner`"
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
    name, dtype, shape = _text(entry["tensor"]), entry["dtype"], tuple(entry["shape"])
    if name not in file.keys():  # noqa: SIM118 - it is no dictionary
        raise ArtefactError(f"{path} lacks the tensor '{name}'")
    tensor: Tensor = file.get_tensor(name)
    if _said(tensor.dtype) != dtype:
        raise ArtefactError(f"{path}: tensor '{name}' is {_said(tensor.dtype)}, expected {dtype}")
    if tensor.shape != shape:
        raise ArtefactError(f"{path}: tensor '{name}' has sizes {tuple(tensor.shape)}, expected {shape}")
    if zlib.crc32(tensor_bytes(tensor)) != entry["crc32"]:
        raise ArtefactError(f"{path} was altered or damaged: tensor '{name}' does not match its checksum")
    return tensor


def _value(entry: dict[str, Any]) -> PlanValue:
    dtype, shape = _text(entry["dtype"]), entry["shape"]
    if dtype not in DTYPES.values():
        raise ValueError(f"{dtype!r} is no dtype of {', '.join(DTYPES.values())}")
    return PlanValue(_text(entry["name"]), dtype, None if shape is None else tuple(shape), bool(entry["fixed_rank"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
