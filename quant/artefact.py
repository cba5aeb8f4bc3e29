"""`save` and `load`: a quantised model as one safetensors file with a JSON manifest in its header. No pickle.

The file holds what the int8 modules hold (plain int8 and float32 tensors) and every other tensor of the model, the
manifest says which float module each int8 one stands for and how it computes. Nothing packed for a CPU is saved, so
what was quantised on one machine loads on another. Loading needs the float model: its code is the structure, its
weights are not read.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from quant import dynamic
from quant.nn.attention import leave_fast_paths
from quant.nn.base import QuantizedWeight, QuantModule, adopt
from quant.nn.embedding import TiedEmbedding
from quant.recipe import QConfig
from quant.report import Report, ReportEntry, attach_report, summary

SCHEMA = 1
"""Version of the manifest; a reader refuses what is newer than itself."""

_SETTINGS = ("backend", "layer_name", "activation_bits", "terms", "per_row", "described", "bits")
"""Attributes of int8 modules that the float module does not tell."""


class ArtefactError(ValueError):
    """A file that is not an artefact, is damaged, or does not fit the model; nothing was loaded."""


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a quantised model to `path`; the file appears only when it is whole.

    Raises:
        ArtefactError: the model holds nothing quantised.
    """
    modules = _int8_modules(model)
    if not modules:
        raise ArtefactError(f"{type(model).__name__} holds no int8 module; quantise it first")
    tensors, same = _distinct(model.state_dict())
    manifest = {
        "schema": SCHEMA,
        "modules": {name: _describe(module) for name, module in modules.items()},
        "same": same,
        "checksums": {name: _checksum(tensor) for name, tensor in tensors.items()},
        "report": summary(model).to_dict()["modules"],
        "versions": {name: _version(name) for name in ("octet-quant", "torch")},
    }
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        save_file(tensors, partial, metadata={"octet": json.dumps(manifest, sort_keys=True)})
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], *, model: nn.Module) -> nn.Module:
    """Read a quantised model: a copy of the float `model` with the int8 modules of the file in place.

    Args:
        path: what `save` wrote.
        model: the float model that was quantised, of the same structure; its weights are not read and may be random.

    Raises:
        ArtefactError: the file is truncated, altered, foreign or newer, or does not fit `model`.
        OSError: the file cannot be read.
    """
    manifest, tensors = _read(Path(path))
    result = copy.deepcopy(model)
    result = _rebuild(result, manifest["modules"], tensors)
    leave_fast_paths(result)
    wanted, given = set(result.state_dict()), set(tensors)
    if wanted != given:
        missing, extra = sorted(wanted - given)[:8], sorted(given - wanted)[:8]
        raise ArtefactError(
            f"{path} does not fit {type(model).__name__}: the model wants {missing or 'nothing'} that the file lacks, "
            f"and the file has {extra or 'nothing'} that the model lacks"
        )
    try:
        result.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise ArtefactError(f"{path} does not fit {type(model).__name__}: {error}") from error
    attach_report(result, Report(tuple(ReportEntry(**entry) for entry in manifest["report"])))
    return result


def _int8_modules(model: nn.Module) -> dict[str, QuantModule]:
    """The int8 modules that stand for a module of the user's, by name; their inner ones go with them."""
    found: dict[str, QuantModule] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantModule) and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = module
    return found


def _describe(module: QuantModule) -> dict[str, Any]:
    inner = {name: child for name, child in module.named_modules() if isinstance(child, QuantModule)}
    return {
        "class": type(module).__name__,
        "inner": {
            name: {key: getattr(child, key) for key in _SETTINGS if hasattr(child, key)}
            for name, child in inner.items()
        },
    }


def _distinct(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor once, contiguous, and the names that share another's (tied weights)."""
    tensors: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    seen: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if tensor.numel() and key in seen:
            same[name] = seen[key]
            continue
        seen[key] = name
        tensors[name] = tensor.detach().contiguous()
    return tensors, same


def _checksum(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.sha256(data).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get("octet")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except safetensors.SafetensorError as error:
        raise ArtefactError(f"{path} is not a whole safetensors file: {error}") from error
    if header is None:
        raise ArtefactError(f"{path} is a safetensors file that quant.save did not write")
    try:
        manifest: dict[str, Any] = json.loads(header)
        schema = int(manifest["schema"])
        checksums: dict[str, str] = manifest["checksums"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"{path} has a damaged manifest: {error}") from error
    if schema > SCHEMA:
        raise ArtefactError(f"{path} has manifest version {schema}, this library reads up to {SCHEMA}: upgrade it")
    wrong = sorted(name for name in set(checksums) | set(tensors) if _differs(tensors.get(name), checksums.get(name)))
    if wrong:
        raise ArtefactError(f"{path} was altered or damaged: {', '.join(wrong[:8])} do not match their checksums")
    return manifest, {**tensors, **{name: tensors[other] for name, other in manifest["same"].items()}}


def _differs(tensor: Tensor | None, checksum: str | None) -> bool:
    return tensor is None or checksum is None or _checksum(tensor) != checksum


def _rebuild(model: nn.Module, modules: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Put an int8 module, of the file's shapes and settings, in place of each float one that the file names."""
    made: dict[int, QuantModule] = {}
    for name, entry in modules.items():
        try:
            old = model.get_submodule(name)
        except AttributeError as error:
            raise ArtefactError(f"the file quantises {name!r}, which {type(model).__name__} does not have") from error
        new = made.get(id(old))
        if new is None:
            new = _stand_in(name, old, entry, tensors)
            adopt(new, old, name)
            _restore(new, name, entry["inner"], tensors)
            made[id(old)] = made[id(new)] = new
        if not name:
            return new
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    return model


def _stand_in(name: str, old: nn.Module, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> QuantModule:
    """An int8 module of the entry's class, made from the float one; its numbers do not matter yet."""
    kind, settings = entry["class"], entry["inner"][""]
    prefix = f"{name}." if name else ""
    if kind == TiedEmbedding.__name__ and isinstance(old, nn.Embedding):
        weight = QuantizedWeight(
            tensors[f"{prefix}q_weight"], tensors[f"{prefix}scale"], tensors.get(f"{prefix}columns"), 8
        )
        return TiedEmbedding(old, weight)
    base = dynamic.base_type(old)
    if base is None or base.__name__ != kind:
        raise ArtefactError(f"the file holds an int8 {kind} for {name or '(root)'!r}, the model a {type(old).__name__}")
    return dynamic.SUPPORTED[base](old, QConfig(weight_bits=settings.get("bits", 8), activation_bits=8))


def _restore(new: QuantModule, name: str, inner: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """The settings and int8 tensors of the file, whatever shapes the stand-in had: two terms have twice the columns."""
    for path, settings in inner.items():
        module = new.get_submodule(path)
        for key, value in settings.items():
            setattr(module, key, value)
        for buffer in list(module._buffers):
            full = ".".join(part for part in (name, path, buffer) if part)
            module.register_buffer(buffer, tensors.get(full))
