"""`save`: write a quantised model as one safetensors file with a JSON manifest in its header, without pickle.

The file holds all tensors of the model, those of int8 modules as plain int8 and float32. The manifest has the class and
settings of each dynamically quantised module, and for a static conversion its programs (`program_document.py`), ranges
and calls (`static/description.py`). Weights packed for a CPU are not saved, so a file loads on any machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from quant.artefact.file import CONSTANT, TABLE, ArtefactError, write
from quant.artefact.manifest_form import SETTINGS
from quant.artefact.save_programs import NoText, write_programs
from quant.export.planned_model import PlannedModel
from quant.export.whole_plan import ExportError, WholePlan, whole_plan
from quant.report import summary
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.names import child_of, full_name
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED, Programs
from quant.runtime.state import without_ranges
from quant.static.description import DESCRIPTION, describe, tables


def save(model: nn.Module, path: str | os.PathLike[str], *, runner: bool = False, example_inputs: Any = None) -> None:
    """Write a quantised model to `path`; the file appears only when it is whole.

    Args:
        model: what `convert`, `quantize_static` or `quantize_dynamic` returned, or a model that has such parts.
        path: the file to write.
        runner: whether `octet-run` and programs in C are to read the file too, without torch and Python. The model has
            to be one native call.
        example_inputs: for the runner, of a model from `quantize_dynamic`, whose forward was never captured: a tensor,
            a tuple of positional arguments, or a dict of keyword arguments. Sizes stay free where the model leaves
            them free.

    Raises:
        ArtefactError: the model has no int8 module, is a part of a converted model, is still being calibrated, or has
            values in its state_dict that are not tensors. With `runner`, it is not one native call; the message names
            the steps outside of it, with reasons.
    """
    if isinstance(model, PlannedModel):
        raise ArtefactError(
            "a PlannedModel has no layers that a file could describe: save the model that it was made of with "
            "runner=True, or copy the file that it was loaded from"
        )
    modules = int8_modules(model)
    static = _static_models(model)
    if not modules and not static:
        raise ArtefactError(f"{type(model).__name__} holds no int8 module; quantise it first")
    report = summary(model)
    programs, constants = _programs(static)
    manifest = {
        "static": {name: describe(part) for name, part in static.items()},
        "programs": programs,
        "modules": {name: describe_layer(module) for name, module in modules.items()},
        "report": report.to_dict()["modules"],
        "float_bytes": report.float_bytes,
    }
    write(
        Path(path),
        {**_state(model, static), **constants},
        manifest,
        _whole_plan(model, example_inputs) if runner else None,
    )


def _whole_plan(model: nn.Module, example_inputs: Any) -> WholePlan:
    try:
        return whole_plan(model, example_inputs)
    except ExportError as error:
        raise ArtefactError(f"for the runner: {error}") from error


def _programs(static: Mapping[str, nn.Module]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """For each static conversion, the document of its programs or the reason that it has none; and their constants."""
    documents: dict[str, Any] = {}
    constants: dict[str, Tensor] = {}
    for name, part in static.items():
        try:
            documents[name], tensors = write_programs(part)
        except NoText as reason:
            documents[name] = {"why_none": str(reason)}
            continue
        constants.update({f"{CONSTANT}{name}/{place}": tensor for place, tensor in enumerate(tensors)})
    return documents, constants


def _is_prepared(module: nn.Module) -> bool:
    """Whether a captured module is prepared and not converted."""
    runner = child_of(module, RESERVED)
    return isinstance(runner, Programs) and not isinstance(runner, ProgramRunner)


def int8_modules(model: nn.Module) -> dict[str, QuantModule]:
    """The outermost int8 modules, by name."""
    modules: dict[str, QuantModule] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantModule) and not any(name.startswith(f"{outer}.") or not outer for outer in modules):
            modules[name] = module
    return modules


def _static_models(model: nn.Module) -> dict[str, nn.Module]:
    """The results of `convert` in a model, by name: the model itself, or parts that the user put into it."""
    if any(_is_prepared(module) for module in model.modules()):
        raise ArtefactError(f"{type(model).__name__} is prepared and not yet int8; call quant.convert first")
    models = {name: module for name, module in model.named_modules() if DESCRIPTION in module.__dict__}
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
        inside = any(name == outer or name.startswith(f"{outer}.") or not outer for outer in models)
        if isinstance(module, (StaticLayer, ProgramRunner)) and not inside:
            raise ArtefactError(
                f"{name or '(root)'} is a part of a statically quantised model, and computes only together with the "
                "rest; save the whole that quant.convert returned"
            )
    return models


def _state(model: nn.Module, static: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """All tensors of the file, except the programs' constants."""
    state = without_ranges(model.state_dict())
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise ArtefactError(f"the state_dict holds {', '.join(odd[:8])}, and safetensors holds tensors alone")
    for name, part in static.items():
        state.update({f"{TABLE}{name}/{key}": table for key, table in tables(part).items()})
    return state


def describe_layer(module: QuantModule) -> dict[str, Any]:
    """The class and settings of an int8 module, from which one without values can be built."""
    inner = {name: child for name, child in module.named_modules() if isinstance(child, QuantModule)}
    return {
        "class": type(module).__name__,
        "inner": {
            name: {key: getattr(child, key) for key in (*SETTINGS, *child.kept_in_files) if hasattr(child, key)}
            for name, child in inner.items()
        },
    }
