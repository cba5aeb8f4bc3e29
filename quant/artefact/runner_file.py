"""Reads the runner's part of a file, which `export/planned_model.py` runs in Python."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from quant.artefact.file import MANIFEST, ArtefactError, refuse_folder
from quant.artefact.runner_document import DOCUMENT, VERSION
from quant.artefact.tensor_bytes import tensor_bytes
from quant.export.output_text import filled, form_of_names
from quant.export.whole_plan import DTYPES, PlanValue, WholePlan
from quant.runtime.names import dtype_name


def read_runner_file(path: Path) -> WholePlan:
    """The runner's part of a file.

    Raises:
        ArtefactError: the file is not from `quant.save`, has no such part, is altered, damaged or of a newer version.
        OSError: it cannot be read.
    """
    refuse_folder(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return _plan(file, path)
    except safetensors.SafetensorError as error:
        raise ArtefactError(f"{path} is no safetensors file, or it was cut: {error}") from error
    except ArtefactError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ArtefactError(f"{path}: its part for the runner was altered or damaged ({reason})") from error


def _plan(file: Any, path: Path) -> WholePlan:
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
    names = tuple(one.name for one in outputs)
    returns = json.loads(document["returns"]) if "returns" in document else form_of_names(names)
    filled(returns, dict.fromkeys(names, torch.empty(0)))  # raises where it names no output
    return WholePlan(plan, steps, constants, inputs, outputs, returns)


def _document(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    if MANIFEST not in metadata:
        raise ArtefactError(f"{path} is a safetensors file that quant.save did not write")
    text = metadata.get(DOCUMENT)
    if text is None:
        raise ArtefactError(
            f"{path} has no part for the runner: write it by quant.save(model, path, runner=True), or by "
            "`quant export --format runner`; quant.load(path, model=...) reads it with the float model"
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
    if dtype_name(tensor.dtype) != dtype:
        raise ArtefactError(f"{path}: tensor '{name}' is {dtype_name(tensor.dtype)}, expected {dtype}")
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
