"""Writes the programs of a converted model as a document for its file (`program_document.py`).

Some programs have no text: those with a constant or object that a file cannot hold, a function outside of the
allow-list, or a class of a package that none of the model's modules is from. Such a model is captured again when it is
loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.artefact.program_document import (
    VERSION,
    check_graphs,
    is_plain,
    packages_of,
    product_document,
    read_layers,
    read_units,
)
from quant.half_precision import OwnOutputs
from quant.runtime.layers.recurrent import StaticCell, StaticRecurrent
from quant.runtime.layers.static_module import StaticQuantModule
from quant.runtime.layers.weighted import FoldedNorm, StaticLayer
from quant.runtime.names import child_of, dtype_name
from quant.runtime.part import Part
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.program_text import text_without_constants
from quant.runtime.programs import RESERVED
from quant.runtime.restored_weights import WeightsToRestore
from quant.runtime.schedule_text import schedule_text
from quant.runtime.text_scanner import TextError
from quant.runtime.tree_text import Writer
from quant.static.description import DESCRIPTION
from quant.static.graph_text import graph_text
from quant.static.kept_graph import graph_of
from quant.static.named_parts import check_names


class NoText(ValueError):
    """A program of the model has no text; the message says why."""


def write_programs(model: nn.Module) -> tuple[dict[str, Any], list[Tensor]]:
    """The document of a model from `convert`, and the constants that its texts name `$0`, `$1`, ...

    Raises:
        NoText: the model cannot be built from a document; the message says why.
    """
    if not model.__dict__[DESCRIPTION].get("fingerprint"):
        raise NoText("its float model holds an object that cannot be inspected")
    writer, names = Writer(), _names(model)
    layers = {id(module): place for place, module in enumerate(_of_class(model, StaticLayer))}
    document = {
        "version": VERSION,
        "half": _half(model),
        "layers": [_layer(one, names) for one in _of_class(model, StaticLayer)],
        "norms": [_norm(one, names, layers) for one in _of_class(model, FoldedNorm)],
        "registered": [_registered(one, names) for one in _of_class(model, StaticQuantModule) if one.sites],
        "recurrent": [{"names": names[id(one)]} for one in _of_class(model, (StaticRecurrent, StaticCell))],
        "units": [_unit(name, first, writer) for name, first in _units(model)],
    }
    constants = writer.constants
    if not all(map(is_plain, constants)):
        raise NoText("a constant of its forward is a tensor that a file cannot hold")
    document["orders"] = {str(place): _order(one) for place, one in enumerate(constants) if not one.is_contiguous()}
    try:
        for read in (read_units, check_graphs):
            read(document, constants, packages_of(model))
        read_layers(document)
        for _, first in _units(model):
            _check_names(first)
    except (TextError, RecursionError) as error:
        raise NoText(str(error)) from error
    return document, [one.detach().contiguous() for one in constants]


def _check_names(first: ProgramRunner) -> None:
    """Check that the modules named by programs exist, as loading does."""
    for runner in first.programs():
        check_names(runner.program, runner)
    for part in _parts(first):
        if isinstance(part.program, Program):
            check_names(part.program, first)


def _names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each module, by its id."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return names


def _of_class(model: nn.Module, kind: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


def _units(model: nn.Module) -> Iterator[tuple[str, ProgramRunner]]:
    for name, module in model.named_modules():
        first = child_of(module, RESERVED)
        if isinstance(first, ProgramRunner):
            yield name, first


def _half(model: nn.Module) -> dict[str, Any] | None:
    """The half type of a model and of its outputs; None for a model in float32."""

    def name(dtype: torch.dtype | None) -> str | None:
        return None if dtype is None else dtype_name(dtype)

    hooks = [hook for hook in model._forward_hooks.values() if isinstance(hook, OwnOutputs)]
    return {"half": name(hooks[0].half), "kinds": [name(one) for one in hooks[0].kinds]} if hooks else None


def _layer(layer: StaticLayer, names: Mapping[int, list[str]]) -> dict[str, Any]:
    return {
        "names": names[id(layer)],
        "product": product_document(layer.product),
        "clamps": [None if clamp is None else [repr(float(end)) for end in clamp] for clamp in layer.clamps],
        "own": layer.own,
        "backend": layer.backend,
        **({"activation_bits": 16} if layer.activation_bits == 16 else {}),
    }


def _registered(layer: StaticQuantModule, names: Mapping[int, list[str]]) -> dict[str, Any]:
    return {"names": names[id(layer)], "class": type(layer).__name__, "own": layer.own}


def _norm(norm: FoldedNorm, names: Mapping[int, list[str]], layers: Mapping[int, int]) -> dict[str, Any]:
    layer = layers.get(id(norm.__dict__["layer"]))
    if layer is None:
        raise NoText(f"{names[id(norm)][0]} belongs to a layer that is not in the model any more")
    return {"names": names[id(norm)], "layer": layer}


def _unit(name: str, first: ProgramRunner, writer: Writer) -> dict[str, Any]:
    return {
        "path": name,
        "programs": [_runner(one, writer) for one in first.programs()],
        "parts": [_part(part, writer) for part in _parts(first)],
    }


def _parts(first: ProgramRunner) -> Iterator[Part]:
    for module in first.root.modules():
        part = getattr(module.__dict__.get("forward"), "__self__", None)
        if isinstance(part, Part) and part.runner is first:
            yield part


def _runner(runner: ProgramRunner, writer: Writer) -> dict[str, Any]:
    origin, restored = runner.origin, runner.weights
    if origin is None or not isinstance(restored, WeightsToRestore):
        raise NoText(f"{runner.expected.path or 'the model'} has a program that is not from quant.convert")
    return {
        **_program(runner.program, writer),
        "ranges": [[value, repr(scale), zero_point] for value, (scale, zero_point) in sorted(runner.ranges.items())],
        "restores": [list(one) for one in restored.tensors],
        "floats": text_without_constants(origin.floats, writer),
        "int8": sorted(origin.int8),
        "graph": graph_text(graph_of(runner), writer),
        "backend": runner.backend,
    }


def _program(program: Program, writer: Writer) -> dict[str, Any]:
    assert program.schedule is not None
    return {"program": text_without_constants(program, writer), "schedule": schedule_text(program.schedule, writer)}


def _part(part: Part, writer: Writer) -> dict[str, Any]:
    if isinstance(part.program, str):
        return {"path": part.path, "why_none": part.program}
    return {"path": part.path, **_program(part.program, writer)}


def _order(tensor: Tensor) -> list[int]:
    """The dimensions in the order of memory, the largest stride first."""
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])
