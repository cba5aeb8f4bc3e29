"""The checkpoint from which an interrupted calibration resumes: observers' buffers and the progress, without pickle.

A safetensors file; its header holds the manifest as JSON: the format's version, the batches and samples seen, the
observers' names, types and settings, digests of the model's parameters and buffers, of the batches seen and of the
file itself, and library versions. A reader finds the old file or the new one, whenever the writer is killed
(`whole_files.py`).
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from quant.calibrate import whole_files
from quant.calibrate.batches import sample_bytes
from quant.calibrate.errors import CheckpointError
from quant.calibrate.json_forms import is_count, is_list, is_text
from quant.observers import FakeQuantizeBase, Observer
from torch import Tensor, nn

SCHEMA = 1
"""Version of the manifest; a reader refuses any other."""

KEY = "octet.calibration"
"""Name of the manifest in the safetensors header."""

WHO = "calibrate.run: checkpoint"
"""Of errors."""


@dataclass(frozen=True)
class Progress:
    """The progress of a calibration.

    Attributes:
        batches, samples: seen so far.
        data: hex digest of those batches (`batches.fingerprint_of_tensors` of each, in order).
        warnings: their texts, so far.
        values: hex digest of what those batches have beside tensors (`batches.value_bytes`); None where an earlier
            version wrote the file, which did not look at it.
    """

    batches: int
    samples: int
    data: str
    warnings: tuple[str, ...] = ()
    values: str | None = None


def observers_of(model: nn.Module) -> dict[str, Observer]:
    """Every observer of the model by its dotted name; one that has several names is there once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Observer)}


def identity(model: nn.Module) -> dict[str, Any]:
    """The observers, and digests of weights and buffers: equal where the statistics of two runs belong together."""
    weights = hashlib.sha256()
    for name, parameter in model.named_parameters():
        weights.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
        weights.update(sample_bytes(parameter))
    observers = [
        [name, f"{type(observer).__module__}.{type(observer).__qualname__}", observer.extra_repr()]
        for name, observer in observers_of(model).items()
    ]
    return {"observers": observers, "weights": weights.hexdigest(), "buffers": [digest_of_buffers(model)]}


def digest_of_buffers(model: nn.Module) -> str:
    """A hex digest of all buffers but those of observers and fake quantisers, which calibration changes."""
    seen, skipped = hashlib.sha256(), list[str]()
    for name, module in model.named_modules():
        if isinstance(module, (Observer, FakeQuantizeBase)):
            skipped.append(f"{name}." if name else "")
    for name, buffer in model.named_buffers():
        if not name.startswith(tuple(skipped)):
            seen.update(f"{name} {buffer.dtype} {list(buffer.shape)}".encode())
            seen.update(sample_bytes(buffer))
    return seen.hexdigest()


def write(path: Path, observers: Mapping[str, Observer], model_identity: Mapping[str, Any], progress: Progress) -> None:
    """Write a checkpoint, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    state = states(observers)
    manifest = {
        "schema": SCHEMA,
        "batches": progress.batches,
        "samples": progress.samples,
        "data": progress.data,
        "values": progress.values,
        "warnings": progress.warnings,
        **model_identity,
        "versions": {name: _version(name) for name in ("octet-quant", "torch")},
    }
    text = json.dumps(manifest, sort_keys=True)
    header = {KEY: text, "digest": digest(text, state)}
    whole_files.replace_file(path, safetensors.torch.save(state, metadata=header), WHO)


def read(path: Path, observers: Mapping[str, Observer], model_identity: Mapping[str, Any]) -> Saved:
    """Read and check a checkpoint; the observers are not touched before `Saved.restore`.

    Raises:
        CheckpointError: the file is truncated, altered, not a checkpoint, or of another model.
        OSError: it cannot be read.
    """
    manifest, state = _read(path)
    manifest["observers"] = [[_now(name), *rest] for name, *rest in manifest["observers"]]
    state = {_now(name): value for name, value in state.items()}
    _check_identity(path, manifest, model_identity)
    copies = {}
    for name, observer in observers.items():
        prefix = f"{name}."
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        copies[name] = copy.deepcopy(observer)
        try:
            copies[name].load_state_dict(own)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path}: the statistics of {name!r} do not fit its observer: {error}") from error
    numbers = manifest["batches"], manifest["samples"], manifest["data"]
    progress = Progress(*numbers, tuple(manifest["warnings"]), manifest.get("values"))
    return Saved(progress, copies)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read and checked, but not restored yet."""

    progress: Progress
    observers: Mapping[str, Observer]

    def restore(self, observers: Mapping[str, Observer]) -> None:
        """Give `observers` the saved statistics."""
        for name, observer in observers.items():
            observer.load_state_dict(self.observers[name].state_dict())


def states(observers: Mapping[str, Observer]) -> dict[str, Tensor]:
    """Every buffer of every observer, on the CPU, by `observer name.buffer name`."""
    tensors: dict[str, Tensor] = {}
    for name, observer in observers.items():
        for key, value in observer.state_dict().items():
            if not isinstance(value, Tensor):
                raise TypeError(f"observer {name!r}: {key} of its state is a {type(value).__name__}, expected tensors")
            # Cloned, as safetensors refuses tensors that share memory.
            tensors[f"{name}.{key}"] = value.detach().cpu().contiguous().clone()
    return tensors


def read_whole(path: Path, key: str, writer: str, remedy: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The manifest and the tensors of a file whose digest is right.

    Args:
        path: of the file.
        key: name of the manifest in its header.
        writer: who writes such files, for errors.
        remedy: what to do, the end of errors.

    Raises:
        CheckpointError: another file, or a damaged one.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}){remedy}") from error
    if key not in header:
        raise CheckpointError(f"{path} is a safetensors file that {writer} did not write{remedy}")
    if header.get("digest") != digest(header[key], state):
        raise CheckpointError(f"{path} was altered or damaged: its digest does not match{remedy}")
    try:
        manifest: Any = json.loads(header[key])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} was altered or damaged: its manifest is no JSON ({error}){remedy}") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path} was altered or damaged: its manifest is no table{remedy}")
    return manifest, state


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    manifest, state = read_whole(path, KEY, "calibrate.run", _REMEDY)
    if manifest.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path} has version {manifest.get('schema')}, this library reads {SCHEMA}: finish with the one that began"
        )
    wrong = [name for name, fits in _FORM.items() if not fits(manifest.get(name))]
    if wrong:
        raise CheckpointError(f"{path} was altered or damaged: {', '.join(wrong)} of its manifest{_REMEDY}")
    return manifest, state


_FORM: Mapping[str, Callable[[Any], bool]] = {
    "batches": is_count,
    "samples": is_count,
    "data": lambda value: isinstance(value, str),
    "weights": lambda value: isinstance(value, str),
    "values": lambda value: value is None or isinstance(value, str),
    "buffers": lambda value: value is None or is_list(value, is_text),
    "warnings": lambda value: is_list(value, is_text),
    "observers": lambda value: is_list(value, lambda one: is_list(one, is_text) and len(one) == 3),
}
"""What a manifest holds."""


_REMEDY = "; delete it to begin anew, or name another"


def _now(name: str) -> str:
    """An observer's name as this version has it; earlier ones called a runner's observers its points."""
    return name.replace("_quant.points.", "_quant.observers.", 1)


def _check_identity(path: Path, manifest: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    theirs, ours = manifest["observers"], expected["observers"]
    if theirs != ours:
        ours_by_name = {name: rest for name, *rest in ours}
        theirs_by_name = {name: rest for name, *rest in theirs}
        names = [*ours_by_name, *(name for name in theirs_by_name if name not in ours_by_name)]
        odd = [name for name in names if ours_by_name.get(name) != theirs_by_name.get(name)]
        detail = (
            f"{odd[0]!r} is {_kind(theirs_by_name.get(odd[0]))} there and {_kind(ours_by_name.get(odd[0]))} here"
            if odd
            else "the order of its observers is another"
        )
        raise CheckpointError(f"{path} belongs to a model prepared in another way: {detail}. {_by(manifest)}{_REMEDY}")
    if manifest["weights"] != expected["weights"]:
        raise CheckpointError(f"{path} was written with other weights in the model. {_by(manifest)}{_REMEDY}")
    buffers = manifest.get("buffers")  # earlier versions wrote none
    if buffers is not None and expected["buffers"][0] not in buffers:
        raise CheckpointError(
            f"{path} was written with other values in the model's buffers, as the running mean and variance of a batch "
            f"norm are. {_by(manifest)}{_REMEDY}"
        )


def _by(manifest: Mapping[str, Any]) -> str:
    versions = manifest.get("versions")
    known = versions if isinstance(versions, dict) else {}
    wrote, here = known.get("octet-quant", "an unknown version"), _version("octet-quant")
    return f"octet-quant {wrote} wrote it, this is {here}: finish with the version and the model that began"


def _kind(entry: list[str] | None) -> str:
    return f"{entry[0].rpartition('.')[2]}({entry[1]})" if entry else "absent"


def digest(manifest: str, state: Mapping[str, Tensor]) -> str:
    """Hex digest of a manifest and of every byte of the tensors; the same on every machine."""
    seen = hashlib.sha256(manifest.encode())
    for name in sorted(state):
        tensor = state[name]
        seen.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.numel():
            seen.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return seen.hexdigest()


def check_folder(path: str | os.PathLike[str] | None, who: str) -> None:
    """Raise an OSError for a checkpoint in no folder, or that is a folder; None is no checkpoint."""
    if path is not None:
        if Path(path).is_dir():
            raise IsADirectoryError(f"{who}: checkpoint {str(path)!r} is a folder, expected the name of a file in it")
        whole_files.check_folder(Path(path), f"{who}: checkpoint")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
