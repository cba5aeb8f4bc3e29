"""`save` and `load`: a quantised model as one safetensors file with a JSON manifest in its header. No pickle.

The file holds what the int8 modules hold (plain int8 and float32 tensors) and every other tensor of the model. The
manifest says which float module each dynamically quantised one stands for, and of a static conversion the ranges and
the calls (`static/description.py`). Nothing packed for a CPU is saved, so what was quantised on one machine loads on
another. Loading needs the float model: its code is the structure, its weights are not read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.artefact.file import ArtefactError, read, write
from quant.artefact.rebuild import rebuild
from quant.copying import copy_model, settled
from quant.dynamic import stand_in
from quant.dynamic_decisions import base_type
from quant.nn.attention import leave_fast_paths
from quant.nn.base import QuantizedWeight, adopt
from quant.nn.embedding import TiedEmbedding
from quant.recipe import QConfig
from quant.report import Report, ReportEntry, attach_report, summary
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.names import full_name
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.static.description import DESCRIPTION, describe, tables
from quant.static.examples import CannotRebuild
from quant.static.runner import runners
from quant.static.state import without_ranges

TABLE = "_quant_table/"
"""Begins the names of look-up tables, which are tensors of the file and of no module's."""

_SETTINGS = ("backend", "layer_name", "activation_bits", "terms", "per_row", "described", "bits")
"""Attributes of int8 modules that the float module does not tell."""


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a quantised model to `path`; the file appears only when it is whole.

    Raises:
        ArtefactError: the model holds nothing quantised, is a part of a converted model or still being calibrated, or
            has more in its state_dict than tensors.
    """
    modules = _int8_modules(model)
    static = _static_models(model)
    if not modules and not static:
        raise ArtefactError(f"{type(model).__name__} holds no int8 module; quantise it first")
    report = summary(model)
    manifest = {
        "static": {name: describe(part) for name, part in static.items()},
        "modules": {name: _describe(module) for name, module in modules.items()},
        "report": report.to_dict()["modules"],
        "float_bytes": report.float_bytes,
    }
    write(Path(path), _state(model, static), manifest)


@torch.inference_mode(False)
def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    example_inputs: Any = None,
    examples: Sequence[Any] = (),
    backend: str | None = None,
) -> nn.Module:
    """Read a quantised model: a copy of the float `model` with the int8 modules of the file in place.

    Args:
        path: what `save` wrote.
        model: the float model that was quantised, of the same structure; its weights are not read and may be random.
        example_inputs: of a static conversion, as for `quant.prepare`; needed only where those that it was made with
            have no JSON form, or decide by their values what the model computes.
        examples: calls of further programs, as for `quant.prepare`; needed only for those with objects (a cache), which
            a file does not hold. The error says which program wants one, and what its calls are.
        backend: a name of `quant.kernels.available()`; None takes the one that the model was quantised for, if any.

    Raises:
        ArtefactError: the file is truncated, altered, foreign or newer, or does not fit `model`.
        OSError: the file cannot be read.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"quant.load: model is a {type(model).__name__}, expected the float nn.Module that was quantised"
        )
    manifest, tensors = read(Path(path))
    tables = {name.removeprefix(TABLE): tensors.pop(name) for name in list(tensors) if name.startswith(TABLE)}
    try:
        result = _rebuild_static(
            copy_model(model), manifest.get("static", {}), tables, example_inputs, examples, backend
        )
        result = _rebuild(result, manifest["modules"], tensors)
    except CannotRebuild as error:
        raise ArtefactError(f"{path} does not fit the model: {error}") from error
    leave_fast_paths(result)
    _fill(result, tensors, path)
    for module in result.modules():
        if backend is not None and isinstance(module, QuantModule):
            module.backend = backend
    attach_report(result, Report(tuple(ReportEntry(**entry) for entry in manifest["report"])))
    return result


def read_report(path: str | os.PathLike[str]) -> Report:
    """The report in a file that `save` wrote, without the model; raises as `load` does where the file is damaged."""
    manifest, tensors = read(Path(path))
    report = Report(tuple(ReportEntry(**entry) for entry in manifest["report"]))
    left = manifest.get("float_bytes")
    if left is None:  # of an older version: what the tensors have beyond the quantised ones
        own = {name: one for name, one in tensors.items() if not (name.startswith(TABLE) or name in manifest["same"])}
        left = max(sum(one.numel() * one.element_size() for one in own.values()) - report.bytes_after, 0)
    return replace(report, float_bytes=left)


def _fill(result: nn.Module, tensors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Load the tensors, each of them and nothing else, as the shapes and types that they are."""
    name = type(result).__name__
    tensors = {**_added_since(result, tensors), **tensors}
    wanted, given = set(without_ranges(result.state_dict())), set(tensors)
    if wanted != given:
        missing, extra = sorted(wanted - given)[:8], sorted(given - wanted)[:8]
        raise ArtefactError(
            f"{path} does not fit {name}: the model wants {missing or 'nothing'} that the file lacks, "
            f"and the file has {extra or 'nothing'} that the model lacks"
        )
    for key, own in without_ranges(result.state_dict()).items():
        if own.dtype != tensors[key].dtype:
            raise ArtefactError(f"{path} does not fit {name}: {key} is {own.dtype}, in the file {tensors[key].dtype}")
    # With the versions of the model's own modules: without, some take it for a state of long ago.
    state = result.state_dict()
    state.update(tensors)
    try:
        result.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ArtefactError(f"{path} does not fit {name}: {error}") from error


def _added_since(result: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that files of older versions do not have, as they were understood then."""
    layers = {name: module for name, module in result.named_modules() if isinstance(module, StaticLayer)}
    added = {f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.unknown_fold().items()}
    return {} if added.keys() & tensors.keys() else added


def _int8_modules(model: nn.Module) -> dict[str, QuantModule]:
    """The int8 modules that stand for a module of the user's, by name; their inner ones go with them."""
    found: dict[str, QuantModule] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantModule) and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = module
    return found


def _static_models(model: nn.Module) -> dict[str, nn.Module]:
    """What `convert` made, by name: the model itself, or parts that the user put in a model."""
    if runners(model):
        raise ArtefactError(f"{type(model).__name__} is prepared and not yet int8; call quant.convert first")
    found = {name: module for name, module in model.named_modules() if DESCRIPTION in module.__dict__}
    replaced = [
        full_name(name, path)
        for name, module in model.named_modules()
        if isinstance(module, ProgramRunner) and module.origin is not None
        for path in module.origin.replaced()
    ]
    if replaced:
        raise ArtefactError(
            f"{', '.join(name.replace(f'{RESERVED}.', '') for name in replaced[:8])} was replaced after quant.convert, "
            "and the float model given to quant.load would not have it; replace it in the float model and convert that"
        )
    for name, module in model.named_modules(remove_duplicate=False):
        inside = any(name == outer or name.startswith(f"{outer}.") or not outer for outer in found)
        if isinstance(module, (StaticLayer, ProgramRunner)) and not inside:
            raise ArtefactError(
                f"{name or '(root)'} is a part of a statically quantised model, and computes only together with the "
                "rest; save the whole that quant.convert returned"
            )
    return found


def _state(model: nn.Module, static: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """All that a loaded model needs to have the same numbers."""
    state = without_ranges(model.state_dict())
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise ArtefactError(f"the state_dict holds {', '.join(odd[:8])}, and safetensors holds tensors alone")
    for name, part in static.items():
        state.update({f"{TABLE}{name}/{key}": table for key, table in tables(part).items()})
    return state


def _rebuild_static(
    model: nn.Module,
    static: Mapping[str, Any],
    tables: Mapping[str, Tensor],
    example_inputs: Any,
    examples: Sequence[Any],
    backend: str | None,
) -> nn.Module:
    """Put a converted model in place of each float one that the file names."""
    if (example_inputs is not None or examples) and set(static) - {""}:
        raise ArtefactError(f"example inputs would be those of {sorted(static)}, parts of the model; load them apart")
    for name, description in static.items():
        part = _submodule(model, name)
        own = {key.removeprefix(f"{name}/"): table for key, table in tables.items() if key.startswith(f"{name}/")}
        made = rebuild(part, description, own, example_inputs, backend, examples)
        if not name:
            return made
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made)
    return model


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ArtefactError(f"the file quantises {name!r}, which {type(model).__name__} does not have") from error


def _describe(module: QuantModule) -> dict[str, Any]:
    inner = {name: child for name, child in module.named_modules() if isinstance(child, QuantModule)}
    return {
        "class": type(module).__name__,
        "inner": {
            name: {key: getattr(child, key) for key in (*_SETTINGS, *child.kept_in_files) if hasattr(child, key)}
            for name, child in inner.items()
        },
    }


def _rebuild(model: nn.Module, modules: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Put an int8 module, of the file's shapes and settings, in place of each float one that the file names."""
    made: dict[int, QuantModule] = {}
    for name, entry in modules.items():
        old = _submodule(model, name)
        new = made.get(id(old))
        if new is None and isinstance(old, QuantModule) and type(old).__name__ == entry["class"]:
            new = made[id(old)] = old  # a static conversion made it
            _restore(new, name, entry["inner"], tensors)
        if new is None:
            source = settled(old)
            new = _stand_in(name, source, entry, tensors)
            adopt(new, source, name)
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
    base = base_type(old)
    qconfig = QConfig(weight_bits=settings.get("bits", 8), activation_bits=8)
    made = None if base is None else stand_in(old, base, qconfig)
    if made is None or type(made).__name__ != kind:
        raise ArtefactError(f"the file holds an int8 {kind} for {name or '(root)'!r}, the model a {type(old).__name__}")
    return made


def _restore(new: QuantModule, name: str, inner: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """The settings and int8 tensors of the file, whatever shapes the stand-in had: two terms have twice the columns."""
    for path, settings in inner.items():
        module = new.get_submodule(path)
        for key, value in settings.items():
            setattr(module, key, value)
        for buffer in list(module._buffers):
            full = full_name(name, path, buffer)
            module.register_buffer(buffer, tensors.get(full))
