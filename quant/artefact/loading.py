"""`load`: build a quantised model from a file of `save` and the float model, whose code gives the structure.

Where the float model is unchanged in everything that its forward may depend on (`static/fingerprint.py`), a static
conversion is built from the programs in the file and nothing is captured. Otherwise, and for files of versions without
programs, the model is captured again and its calls are compared with those in the file (`rebuild.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.artefact.file import CONSTANT, TABLE, ArtefactError, read, writer
from quant.artefact.load_programs import BROKEN, build
from quant.artefact.manifest_form import check_setting
from quant.artefact.program_document import VERSION
from quant.artefact.runner_file import read_runner_file
from quant.artefact.without_memory import finish, give_memory, on_the_cpu
from quant.copying import copy_model, settled
from quant.derived_buffers import NoValues
from quant.dynamic import stand_in
from quant.dynamic_decisions import base_type
from quant.export.planned_model import PlannedModel
from quant.half_precision import half_of
from quant.kernels import BackendUnavailable
from quant.nn.attention import leave_fast_paths
from quant.nn.base import QuantizedWeight, adopt
from quant.nn.embedding import TiedEmbedding
from quant.pretrained import refuse_to_save
from quant.recipe import QConfig
from quant.report import Report, ReportEntry, attach_report
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.scaled_linear import ones_for, scale_inputs
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.names import full_name, put_module
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.state import without_ranges
from quant.runtime.text_scanner import UnknownClass
from quant.static.examples import CannotRebuild
from quant.static.fingerprint import fingerprint


@torch.inference_mode(False)
@on_the_cpu()
def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    example_inputs: Any = None,
    examples: Sequence[Any] = (),
    backend: str | None = None,
) -> nn.Module:
    """Read a quantised model: a copy of the float `model` with the int8 modules of the file in place.

    Without `model`, a file of `save(..., runner=True)` or `quant import` is read as what the torch-free runner runs: a
    `quant.export.PlannedModel`, one native call with the runner's bits, which needs no code of the model's.

    Args:
        path: a file that `save` wrote.
        model: the float model that was quantised, of the same structure; its weights are not read and may be random, or
            on the meta device: a layer then has float weights only while its int8 form is made, unless a static
            conversion has to be captured again (below). None reads the runner's part of the file.
        example_inputs: as for `quant.prepare`, for a static conversion that has to be captured again: the file is of a
            version without programs, a program has no text, or the model's code has changed. Needed only where the
            inputs given to `prepare` have no JSON form, or where the model branches on their values.
        examples: calls of further programs, likewise; needed only for calls with objects (a cache), which a file does
            not hold. The error names the program that needs one, and describes its calls.
        backend: a name of `quant.kernels.available()`; None takes the one that the model was quantised for, if any.

    Raises:
        ArtefactError: the file is truncated, altered, not from `save`, of a newer version, or does not fit `model`.
        OSError: the file cannot be read.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"quant.load: path is a {type(path).__name__}, expected the name of a file of quant.save; a state dict has "
            "neither settings nor programs: save the model that it is of by quant.save"
        )
    if model is None:
        if example_inputs is not None or examples:
            raise TypeError("quant.load: example_inputs and examples go with model, the float model to be captured")
        return _load_plan(Path(path), backend)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"quant.load: model is a {type(model).__name__}, expected the float nn.Module that was quantised"
        )
    manifest, tensors = read(Path(path))
    if manifest.get("imported"):
        raise ArtefactError(
            f"{path} is a file that `quant import` wrote: it is a plan and fits no module; read it by quant.load(path) "
            "without model, or run it with `quant run` or octet-run"
        )
    static: Mapping[str, Any] = manifest.get("static", {})
    if (example_inputs is not None or examples) and set(static) - {""}:
        raise ArtefactError(f"example inputs would be those of {sorted(static)}, parts of the model; load them apart")
    try:
        result = _built(model, manifest, tensors, backend, example_inputs, examples)
    except (CannotRebuild, ArtefactError, NoValues) as error:
        raise ArtefactError(f"{path} does not fit the model: {error} (written by {writer(manifest)})") from error
    except BROKEN as error:
        raise ArtefactError(
            f"{path} was altered or damaged, or does not fit the model ({type(error).__name__}: {error})"
        ) from error
    leave_fast_paths(result)
    _fill(result, tensors, path)
    for module in result.modules():
        if backend is not None and isinstance(module, QuantModule):
            module.backend = backend
        if isinstance(module, ProgramRunner):
            _make_ready(module, path, named=backend is not None)
    attach_report(result, Report(tuple(ReportEntry(**entry) for entry in manifest.get("report", ()))))
    refuse_to_save(result, "is a model of quant.load")
    return result


def _make_ready(module: ProgramRunner, path: Any, *, named: bool) -> None:
    try:
        module.make_ready()
    except BackendUnavailable as error:
        if named:
            raise
        raise ArtefactError(f"{path}: {error}; the argument backend takes another than the file's") from error


def _built(
    model: nn.Module,
    manifest: Mapping[str, Any],
    tensors: dict[str, Tensor],
    backend: str | None,
    example_inputs: Any,
    examples: Sequence[Any],
) -> nn.Module:
    """The quantised model; `tensors`, without those of programs, are still to be loaded."""
    kept = {begin: _taken(tensors, begin) for begin in (TABLE, CONSTANT)}
    result = copy_model(model)
    for name in manifest.get("static", {}):
        source = _Source(name, manifest, kept[TABLE], kept[CONSTANT], tensors, backend)
        result = _with_static(result, source, example_inputs, examples)
    result = _rebuild(result, manifest.get("modules", {}), tensors)
    finish(result)
    return result


def _load_plan(path: Path, backend: str | None) -> PlannedModel:
    """The runner's part of a file as a module."""
    plan = read_runner_file(path)
    result = PlannedModel(plan, backend)
    attach_report(result, read_report(path))
    return result


def read_report(path: str | os.PathLike[str]) -> Report:
    """The report in a file that `save` wrote, without the model; raises as `load` does where the file is damaged."""
    manifest, tensors = read(Path(path))
    report = Report(tuple(ReportEntry(**entry) for entry in manifest.get("report", ())))
    left = manifest.get("float_bytes")
    if left is None:  # of an older version: what the tensors have beyond the quantised ones
        own = {
            name: one
            for name, one in tensors.items()
            if not (name.startswith(TABLE) or name in manifest.get("same", ()))
        }
        left = max(sum(one.numel() * one.element_size() for one in own.values()) - report.bytes_after, 0)
    return replace(report, float_bytes=left)


def _fill(result: nn.Module, tensors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Load the tensors into the model; names, shapes and dtypes must be the model's."""
    name = type(result).__name__
    tensors = {**_added_since(result, tensors), **tensors}
    wanted, there = set(without_ranges(result.state_dict())), set(tensors)
    if wanted != there:
        missing, extra = sorted(wanted - there)[:8], sorted(there - wanted)[:8]
        raise ArtefactError(
            f"{path} does not fit {name}: the model wants {missing or 'nothing'} that the file lacks, "
            f"and the file has {extra or 'nothing'} that the model lacks"
        )
    for key, own in without_ranges(result.state_dict()).items():
        if own.dtype != tensors[key].dtype:
            raise ArtefactError(f"{path} does not fit {name}: {key} is {own.dtype}, in the file {tensors[key].dtype}")
    # The versions of the model's own modules stay: without them some take it for an old state.
    state = result.state_dict()
    state.update(tensors)
    try:
        result.load_state_dict(state, strict=True)
    except BROKEN as error:
        raise ArtefactError(f"{path} does not fit {name}: {error}") from error


def _added_since(result: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Neutral values of tensors that files of older versions do not have."""
    layers = {name: module for name, module in result.named_modules() if isinstance(module, StaticLayer)}
    added = {f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.unknown_fold().items()}
    return {} if added.keys() & tensors.keys() else added


def _taken(tensors: dict[str, Tensor], begin: str) -> dict[str, Tensor]:
    """Remove the tensors whose names begin with `begin`; returns them by the rest of their names."""
    return {name.removeprefix(begin): tensors.pop(name) for name in list(tensors) if name.startswith(begin)}


class _Source:
    """The contents of a file for one static conversion.

    Attributes:
        name: of the part of the model that was converted, '' for the whole.
        description: as of `static/description.py`.
        document: as of `program_document.py`; or the reason that there are no programs.
        tables: lookup tables, by the names of units and steps.
        constants: those of the programs, in order.
        tensors: those of the converted part, by their names in it.
        modules: of the outermost int8 modules in it, by name, the class and settings.
        backend: replaces the file's; None keeps it.
    """

    def __init__(
        self,
        name: str,
        manifest: Mapping[str, Any],
        tables: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        backend: str | None,
    ) -> None:
        self.name, self.backend = name, backend
        self.description: dict[str, Any] = manifest["static"][name]
        self.document: dict[str, Any] = manifest.get("programs", {}).get(name, {})
        self.tables = _inside(tables, f"{name}/")
        numbered = _inside(constants, f"{name}/")
        self.constants = [numbered[place] for place in sorted(numbered, key=int)]
        prefix = f"{name}." if name else ""
        self.tensors = _inside(tensors, prefix)
        self.modules = _inside(manifest["modules"], prefix)

    @property
    def earlier(self) -> dict[str, Any]:
        """The entries of modules that were int8 before the conversion."""
        names = set(self.description.get("earlier", ()))
        return {name: entry for name, entry in self.modules.items() if name in names}

    def built(self, part: nn.Module) -> nn.Module | None:
        """The model built from its programs; None where the file has none for this float model."""
        if self.document.get("version") != VERSION:
            return None
        half = self.document.get("half")
        if half is not None:
            if str(half_of(part)) != f"torch.{half['half']}":
                return None  # the outputs have the types of the model that is given
            part = copy_model(part).float()
        expected = self.description.get("fingerprint")
        if not expected or fingerprint(part) != expected:
            return None
        _forget_weights(part, self.modules)
        try:
            return build(part, self.description, self.document, self.constants, self.tensors, self.backend)
        except UnknownClass:  # the script that saved it had the class in a module of another name
            return None


def _inside(named: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


@torch.no_grad()
def _forget_weights(model: nn.Module, names: Iterable[str]) -> None:
    """Fill the float weights that int8 ones replace with 1: a model initialised without values may hold NaN."""
    for name in names:
        for parameter in _submodule(model, name).parameters():
            if parameter.is_floating_point():
                parameter.fill_(1.0)


def _with_static(model: nn.Module, source: _Source, example_inputs: Any, examples: Sequence[Any]) -> nn.Module:
    """Replace a float part that the file names by its static conversion; its int8 layers of before come first."""
    part = _with_scaled_layers(_submodule(model, source.name), source.description.get("scaled", []))
    part = _rebuild(part, source.earlier, source.tensors)
    rebuilt = source.built(part)
    if rebuilt is None:
        from quant.artefact.rebuild import rebuild  # imports capture and conversion, which loading mostly does without

        model = put_module(model, source.name, part)
        finish(model)  # the whole of it: a buffer may be computed by a module around the part
        part = model.get_submodule(source.name)
        rebuilt = rebuild(part, source.description, source.tables, example_inputs, source.backend, examples)
    return put_module(model, source.name, rebuilt)


def _with_scaled_layers(part: nn.Module, names: Sequence[str]) -> nn.Module:
    """A float part with scaled linear layers where the file has some; their numbers are loaded later."""
    for name in names:
        if type(_submodule(part, name)) is not nn.Linear:
            raise ArtefactError(
                f"the file scales the input of {name!r}, which is a {type(_submodule(part, name)).__name__}"
            )
    return scale_inputs(part, ones_for(part, names))


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ArtefactError(f"the file quantises {name!r}, which {type(model).__name__} does not have") from error


def _rebuild(model: nn.Module, modules: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Replace each float module that the file names by an int8 one of the file's shapes and settings."""
    rebuilt: dict[int, QuantModule] = {}
    for name, entry in modules.items():
        old = _submodule(model, name)
        new = rebuilt.get(id(old))
        if new is None and isinstance(old, QuantModule) and type(old).__name__ == entry["class"]:
            new = rebuilt[id(old)] = old  # already int8, by a static conversion
            _restore(new, name, entry["inner"], tensors)
        if new is None:
            source = settled(old)
            give_memory(source.modules())
            new = _stand_in(name, source, entry, tensors)
            adopt(new, source, name)
            _restore(new, name, entry["inner"], tensors)
            rebuilt[id(old)] = rebuilt[id(new)] = new
        model = put_module(model, name, new)
    return model


def _stand_in(name: str, old: nn.Module, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> QuantModule:
    """An int8 module of the entry's class for the float one; its values are loaded later."""
    kind, settings = entry["class"], entry["inner"][""]
    prefix = f"{name}." if name else ""
    if kind == TiedEmbedding.__name__ and isinstance(old, nn.Embedding):
        weight = QuantizedWeight(
            tensors[f"{prefix}q_weight"], tensors[f"{prefix}scale"], tensors.get(f"{prefix}columns"), 8
        )
        return TiedEmbedding(old, weight)
    base = base_type(old)
    qconfig = QConfig(weight_bits=settings.get("bits", 8), activation_bits=8)
    layer = None if base is None else stand_in(old, base, qconfig)
    if layer is None or type(layer).__name__ != kind:
        raise ArtefactError(f"the file holds an int8 {kind} for {name or '(root)'!r}, the model a {type(old).__name__}")
    return layer


def _restore(new: QuantModule, name: str, inner: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Set the file's settings and int8 tensors; shapes may differ, since two terms have twice the columns."""
    for path, settings in inner.items():
        module = new.get_submodule(path)
        if not isinstance(module, QuantModule):
            raise ArtefactError(f"the file has settings of {full_name(name, path)!r}, which is no int8 layer")
        for key, value in settings.items():
            check_setting(key, value, module.kept_in_files)
            setattr(module, key, value)
        for buffer, own in list(module._buffers.items()):
            full = full_name(name, path, buffer)
            if own is not None and full not in tensors and not buffer.startswith("columns"):
                raise ArtefactError(f"the file lacks {full!r}")
            module.register_buffer(buffer, tensors.get(full))
