"""The file format of quantised models: tensors in safetensors, a JSON manifest in the header, and checksums of both.

The manifest's entries about the model are those of `saving.py`. A file is written whole or not at all, and read whole
or refused.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from quant.artefact import manifest_form, runner_document
from quant.artefact.tensor_bytes import tensor_bytes
from quant.calibrate.whole_files import replacing
from quant.export.whole_plan import WholePlan

SCHEMA = 4
"""Version of the manifest; a reader refuses newer ones. 2 added static conversions and a digest, 3 their programs, 4
the part for the runner. A file without that part is written as 3."""

TABLE = "_quant_table/"
"""Prefix of the names of lookup tables, which belong to no module."""

CONSTANT = "_quant_constant/"
"""Prefix of the names of the programs' constants, which belong to no module."""

MANIFEST = "octet"
"""The key of the manifest in the metadata of a safetensors file."""


class ArtefactError(ValueError):
    """A file cannot be written or loaded: it is not one of `quant.save`, is damaged, or does not fit the model."""


def write(
    path: Path, state: Mapping[str, Tensor], manifest: Mapping[str, Any], runner: WholePlan | None = None
) -> None:
    """Write tensors, each once, the manifest, and with a plan the runner's part.

    A file at `path` is replaced when everything is written.
    """
    constants = {} if runner is None else runner_document.named_constants(runner)
    tensors, same = _distinct({**state, **constants})
    checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    for name, stored in _copies(tensors, checksums).items():
        same[name] = stored
        del tensors[name], checksums[name]
    whole = {
        **manifest,
        "schema": SCHEMA - 1 if runner is None else SCHEMA,
        "same": same,
        "checksums": checksums,
        "forms": {name: _form(tensor) for name, tensor in tensors.items()},
        "versions": {name: _version(name) for name in ("octet-quant", "torch")},
    }
    metadata = {MANIFEST: json.dumps({**whole, "digest": _digest(whole)}, sort_keys=True)}
    if runner is not None:
        metadata.update(runner_document.metadata(runner, same, writer(whole)))
    with replacing(path, "quant.save") as partial:
        partial.touch()
        mode = partial.stat().st_mode  # by the user's umask; safetensors creates files that only their owner can read
        try:
            save_file(tensors, partial, metadata=metadata)
        except safetensors.SafetensorError as error:
            raise _as_system_error(error) from error
        partial.chmod(mode)


def _as_system_error(error: safetensors.SafetensorError) -> Exception:
    """What the system said, of which safetensors has the number in its text."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return error if number is None else OSError(int(number[1]), os.strerror(int(number[1])))


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The manifest and the tensors, under all their names.

    Raises:
        ArtefactError: the file is truncated, altered, not from `quant.save`, or of a newer version.
        OSError: it cannot be read.
    """
    refuse_folder(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except safetensors.SafetensorError as error:
        raise ArtefactError(f"{path} is not a whole safetensors file: {error}") from error
    header = metadata.get(MANIFEST)
    if header is None:
        raise ArtefactError(f"{path} is a safetensors file that quant.save did not write")
    try:
        manifest: dict[str, Any] = json.loads(header)
        schema = int(manifest["schema"])
        checksums: dict[str, str] = manifest["checksums"]
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise ArtefactError(f"{path} has a damaged manifest: {error}") from error
    if schema > SCHEMA:
        raise ArtefactError(
            f"{path} was written by {writer(manifest)} with manifest version {schema}, this library reads up to "
            f"{SCHEMA}: upgrade it"
        )
    if schema > 1 and manifest.get("digest") != _digest(manifest):
        raise ArtefactError(f"{path} was altered or damaged: its manifest does not match its checksum")
    try:
        manifest_form.check(manifest)
    except ValueError as error:
        raise ArtefactError(f"{path} was altered or damaged: {error}") from error
    wrong = sorted(name for name in set(checksums) | set(tensors) if _differs(tensors.get(name), checksums.get(name)))
    forms: Mapping[str, str] = manifest.get("forms", {})  # older files have none
    wrong = wrong or sorted(name for name, form in forms.items() if name not in tensors or _form(tensors[name]) != form)
    if wrong:
        raise ArtefactError(f"{path} was altered or damaged: {', '.join(wrong[:8])} do not match their checksums")
    same: Mapping[str, str] = manifest.get("same", {})
    absent = sorted(set(same.values()) - tensors.keys())
    if absent:
        raise ArtefactError(f"{path} was altered or damaged: it lacks the tensor {absent[0]!r}, which has other names")
    named = {**tensors, **{name: tensors[other] for name, other in same.items()}}
    return manifest, {name: one for name, one in named.items() if not name.startswith(runner_document.CONSTANT)}


def refuse_folder(path: Path) -> None:
    """Raise ArtefactError for a folder, of which the system says "No such device"."""
    if path.is_dir():
        raise ArtefactError(
            f"{path} is a folder, expected a file that quant.save wrote; the model in a folder of save_pretrained is "
            "loaded by transformers' from_pretrained"
        )


def _differs(tensor: Tensor | None, checksum: str | None) -> bool:
    return tensor is None or checksum is None or _checksum(tensor) != checksum


def _form(tensor: Tensor) -> str:
    """The dtype and the shape, which stand in the file's header beside the bytes."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    return _sha256(json.dumps(rest, sort_keys=True).encode())


def _distinct(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, contiguous; and for tied tensors, their name -> the name under which it is stored."""
    tensors: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    seen: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in seen:
            same[name] = seen[key]
            continue
        seen[key] = name
        tensors[name] = tensor.detach().contiguous()
    return tensors, same


def _copies(tensors: Mapping[str, Tensor], checksums: Mapping[str, str]) -> dict[str, str]:
    """The plan's constants that the model has too, in other memory, as one that was captured for the export has; and
    these tensors of the model."""
    kept: dict[tuple[str, torch.Size, torch.dtype], str] = {}
    copies: dict[str, str] = {}
    for name, tensor in tensors.items():  # those of the model come first
        key = checksums[name], tensor.shape, tensor.dtype
        if not name.startswith(runner_document.CONSTANT):
            kept.setdefault(key, name)
        elif key in kept:
            copies[name] = kept[key]
    return copies


def _checksum(tensor: Tensor) -> str:
    return _sha256(tensor_bytes(tensor))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def writer(manifest: Mapping[str, Any]) -> str:
    """The version of this library that wrote a file, for errors."""
    versions = manifest.get("versions")
    known = versions.get("octet-quant") if isinstance(versions, dict) else None
    return f"octet-quant {known if isinstance(known, str) else 'of an unknown version'}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
