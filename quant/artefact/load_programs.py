"""Builds a static conversion from the programs in a file, without capture, planning or conversion.

The float model becomes the converted one: int8 layers replace its layers, each captured module gets a runner, and
tensors that a conversion removes are removed. The model's code is used, its weights are not read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from quant.artefact.program_document import (
    LayerDocument,
    RunnerDocument,
    UnitDocument,
    laid_out,
    packages_of,
    read_layers,
    read_units,
)
from quant.half_precision import OwnOutputs, WideInputs, note_half
from quant.int8_classes import LAYERS, static_layer
from quant.kernels import ACTIVATION_U8, QParams, narrow
from quant.kernels.registry import full_name_of
from quant.leaves import base_layer
from quant.nn.base import adopt
from quant.nn.inherited import inherit
from quant.recipe import QConfig
from quant.recurrent_layers import directions_of, is_cell, kind_of, sizes_of
from quant.runtime.as_forward import as_forward
from quant.runtime.layers.products import LinearProduct
from quant.runtime.layers.recurrent import RecurrentRanges, StaticCell, StaticRecurrent
from quant.runtime.layers.recurrent_module import Int8Tensors
from quant.runtime.layers.sites import RANGES
from quant.runtime.layers.weighted import FoldedNorm, QWeight, StaticLayer
from quant.runtime.names import full_name, put_module
from quant.runtime.part import Part
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.runtime.shown_programs import show_programs
from quant.runtime.state import keep_ranges
from quant.runtime.text_scanner import TextError, UnknownClass
from quant.runtime.user_replacements import ProgramOrigin
from quant.static.description import DESCRIPTION
from quant.static.examples import CannotRebuild
from quant.static.kept_graph import keep_graph
from quant.static.named_parts import check_names, check_paths
from quant.static.registered_layers import placed, registered_layer
from quant.static.removed_tensors import remove_parametrizations, remove_tensor

BROKEN = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, SyntaxError)
"""What reading a document may come to that `save_programs.py` did not write."""


def build(
    model: nn.Module,
    description: Mapping[str, Any],
    document: Mapping[str, Any],
    constants: list[Tensor],
    tensors: Mapping[str, Tensor],
    backend: str | None,
) -> nn.Module:
    """The converted model that a document describes; load its state_dict afterwards.

    Args:
        model: a copy of the float model, whose fingerprint is the description's; it becomes the converted one.
        description: of the conversion (`static/description.py`).
        document: from `write_programs`.
        constants: the tensors that its texts name.
        tensors: of the converted model, by their names.
        backend: instead of those of layers and programs.

    Raises:
        UnknownClass: its texts name classes that are not here, or elsewhere; `model` is as it was.
        CannotRebuild: the document is damaged.
    """
    try:
        return _Builder(model, document, constants, tensors, backend).build(description)
    except UnknownClass:
        raise
    except BROKEN as error:  # RecursionError is a RuntimeError
        raise CannotRebuild(f"its programs cannot be read: {error}") from error


class _Builder:
    """A model on its way from float to what a document says.

    Attributes:
        model: what it has become so far.
        layers: the int8 layers of the document.
    """

    def __init__(
        self,
        model: nn.Module,
        document: Mapping[str, Any],
        constants: list[Tensor],
        tensors: Mapping[str, Tensor],
        backend: str | None,
    ) -> None:
        self.model, self.document, self.tensors, self.backend = model, document, tensors, backend
        self.units = read_units(document, laid_out(constants, document["orders"]), packages_of(model))
        self.layers = read_layers(document)
        self.int8 = [_layer(one, tensors, backend) for one in self.layers]

    def build(self, description: Mapping[str, Any]) -> nn.Module:
        """The converted model."""
        self.model.eval()
        self._place_modules(description["layers"])
        for unit in self.units:
            self._install(unit)
        for one, layer in zip(self.layers, self.int8, strict=True):  # of functional calls, in the runners
            self._place([name for name in one.names if _in_runner(name)], layer)
        for path in description["removed"]:
            if not remove_tensor(self.model, path):
                raise TextError(f"{path} is not there to be taken away")
        for unit in self.units:
            remove_parametrizations(self.model.get_submodule(unit.path))
        for unit in self.units:
            self._complete(unit)
        if self.document["half"] is not None:
            _give_halves(self.model, self.document["half"])
        description = {**description, "backend": self.backend or description["backend"]}
        description.pop("backends", None)
        self.model.__dict__[DESCRIPTION] = description
        keep_ranges(self.model)
        show_programs(self.model)
        return self.model

    def _place_modules(self, settings: Mapping[str, Any]) -> None:
        """Replace the user's layers by int8 ones, and folded batch norms by `FoldedNorm`."""
        for entry in self.document.get("registered", ()):  # older files have none
            name = entry["names"][0]
            self._place(entry["names"], self._registered(self.model.get_submodule(name), entry, settings))
        for entry in self.document["recurrent"]:
            name = entry["names"][0]
            self._place(entry["names"], _recurrent(self.model.get_submodule(name), name, self.tensors))
        for one, layer in zip(self.layers, self.int8, strict=True):
            names = [name for name in one.names if not _in_runner(name)]
            if names:
                inherit(layer, self.model.get_submodule(names[0]))
                self._place(names, layer)
        for entry in self.document["norms"]:
            self._place(entry["names"], FoldedNorm(self.int8[entry["layer"]]))

    def _registered(self, module: nn.Module, entry: Mapping[str, Any], settings: Mapping[str, Any]) -> nn.Module:
        """The int8 form of a module by what is registered for its class here; its own numbers are loaded later."""
        name = entry["names"][0]
        kind = base_layer(module)
        known = None if kind is None else static_layer(kind)
        make = None if kind is None else LAYERS.get(kind)
        if known is None or make is None or known.__name__ != entry["class"]:
            raise TextError(
                f"it holds an int8 {entry['class']} for {name or '(root)'!r}, and {full_name_of(type(module))} has "
                f"{'no such layer' if known is None else full_name_of(known)} here; import what registers it "
                "(quant.nn.register_int8)"
            )
        [qconfig] = {one: QConfig.from_dict(settings[one]) for one in entry["names"] if one in settings}.values()
        layer = placed(registered_layer(module, qconfig, make), module, name, self.backend)
        for key in RANGES:
            setattr(layer, key, self.tensors[full_name(name, key)])
        layer.own = entry["own"]
        layer.derive()
        if type(layer.own) is not int or not 0 <= layer.own < layer.sites:
            raise TextError(f"layer {name!r}: its numbers do not fit each other")
        return layer

    def _place(self, names: Iterable[str], module: nn.Module) -> None:
        for name in names:
            holder, _, child = name.rpartition(".")
            parent = self.model.get_submodule(holder)
            if name and child not in parent._modules and not isinstance(parent, nn.ModuleDict):
                raise TextError(f"{name} is not a module of the model")
            self.model = put_module(self.model, name, module)

    def _install(self, unit: UnitDocument) -> None:
        """Give a captured module the runner of its programs, and its parts their forwards."""
        root = self.model.get_submodule(unit.path)
        own = root.__dict__.pop("forward", None)
        runners = [self._runner(root, one) for one in unit.runners]
        for runner in runners:
            runner.own_forward = own
        first, *others = runners
        first.others.extend(others)
        root._modules[RESERVED] = first
        root.__dict__["forward"] = as_forward(first.run, root, own)
        for path, program in unit.parts.items():
            part = root.get_submodule(path)
            part.__dict__["forward"] = Part(part, path, program, first).run

    def _runner(self, root: nn.Module, document: RunnerDocument) -> ProgramRunner:
        runner = ProgramRunner(root, document.program, document.ranges, self.backend or document.backend)
        runner.weights = document.restored
        keep_graph(runner, document.graph)
        return runner.eval()

    def _complete(self, unit: UnitDocument) -> None:
        """Check that the modules named by programs exist, once all are in their places."""
        root = self.model.get_submodule(unit.path)
        first = root._modules[RESERVED]
        assert isinstance(first, ProgramRunner)
        for runner, document in zip(first.programs(), unit.runners, strict=True):
            check_names(runner.program, runner)
            check_paths(document.floats)
            runner.origin = ProgramOrigin(root, runner.program, document.floats, document.int8)
        for program in unit.parts.values():
            if isinstance(program, Program):
                check_names(program, first)


def _in_runner(name: str) -> bool:
    """Whether a module belongs to a functional call: its name leads through a runner."""
    return RESERVED in name.split(".")


def _layer(one: LayerDocument, tensors: Mapping[str, Tensor], backend: str | None) -> StaticLayer:
    name = one.names[0]
    own = {key: tensors.get(full_name(name, key)) for key in ("bias", "fold_gain", "fold_shift")}
    q_weight, scale = (tensors[full_name(name, key)] for key in ("q_weight", "weight_scale"))
    weight = QWeight(q_weight, scale, own["bias"])
    layer = StaticLayer(one.product, weight, backend or one.backend, activation_bits=one.activation_bits)
    layer.fold_gain, layer.fold_shift = own["fold_gain"], own["fold_shift"]
    layer.clamps, layer.own = one.clamps, one.own
    layer.layer_name = "" if _in_runner(name) else name
    for key in ("input", "output"):
        for kind in ("scale", "zero_point"):
            setattr(layer, f"{key}_{kind}", tensors[full_name(name, f"{key}_{kind}")])
    _check_layer(name, layer)
    return layer


def _check_layer(name: str, layer: StaticLayer) -> None:
    """Refuse a layer whose tensors and settings do not fit each other."""
    sites, (out,) = (len(layer.clamps),), layer.weight_scale.shape
    per_channel = [layer.weight_scale, layer._buffers["bias"], layer.fold_gain, layer.fold_shift]
    per_site = [layer.input_scale, layer.input_zero_point, layer.output_scale, layer.output_zero_point]
    shapes = [one is None or one.shape == (out,) for one in per_channel] + [one.shape == sites for one in per_site]
    widths = [len(value) for value in layer.product.settings.values() if isinstance(value, (list, tuple))]
    spatial = all(width == layer.q_weight.dim() - 2 for width in widths)
    if not all(shapes) or not spatial or not _is_weight(layer) or not 0 <= layer.own < sites[0]:
        raise TextError(f"layer {name!r}: its tensors and settings do not fit each other")


def _is_weight(layer: StaticLayer) -> bool:
    """Whether its weight is int8, or narrow where its kernels take that."""
    if layer.q_weight.dtype == torch.int8:
        return True
    if not isinstance(layer.product, LinearProduct):
        return False
    with contextlib.suppress(TypeError, ValueError):
        narrow.check(layer.q_weight, layer.weight_scale)
        return layer.weight_scale.dim() == 1
    return False


def _recurrent(module: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The int8 form of a float recurrent layer, which determines kind and sizes."""
    kind, sizes, cell = kind_of(module), sizes_of(module), is_cell(module)
    places = ["direction"] if cell else [f"directions.{place}" for place in range(len(directions_of(module)))]
    directions = [_direction(full_name(name, place), tensors) for place in places]
    inputs, states, products = (_ranges(full_name(name, one), tensors) for one in ("input", "state", "product"))
    layers, projects = 1 if cell else sizes.num_layers, directions[0].q_weight_hr is not None
    if (len(inputs), len(states), len(products)) != (1, layers, layers * projects):
        raise TextError(f"layer {name!r}: its ranges do not fit its layers")
    ranges = RecurrentRanges(inputs[0], states, products)
    layer = StaticCell(kind, sizes, directions[0], ranges) if cell else StaticRecurrent(kind, sizes, directions, ranges)
    adopt(layer, module, name)
    layer.__dict__.pop("forward", None)
    return layer


def _direction(name: str, tensors: Mapping[str, Tensor]) -> Int8Tensors:
    own: dict[str, Any] = {item.name: tensors.get(full_name(name, item.name)) for item in fields(Int8Tensors)}
    absent = [key for key in ("q_weight_ih", "scale_ih", "q_weight_hh", "scale_hh") if own[key] is None]
    if absent or (own["q_weight_hr"] is None) != (own["scale_hr"] is None):
        raise TextError(f"layer {name!r} lacks {(absent or ['q_weight_hr or scale_hr'])[0]}")
    return Int8Tensors(**own)


def _ranges(name: str, tensors: Mapping[str, Tensor]) -> list[QParams]:
    """The ranges with these names in the file; an empty list where it has none."""
    scales, points = (tensors.get(f"{name}_{one}") for one in ("scale", "zero_point"))
    if scales is None or points is None:
        return []
    pairs = zip(scales.reshape(-1), points.reshape(-1), strict=True)
    return [QParams(scale, point, ACTIVATION_U8) for scale, point in pairs]


def _give_halves(model: nn.Module, entry: Mapping[str, Any]) -> None:
    """Let a model that computes in float32 take and return the half type of the user's."""

    def dtype(name: str) -> torch.dtype:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise TextError(f"{name!r} is not a dtype")
        return dtype

    kinds = [None if name is None else dtype(name) for name in entry["kinds"]]
    model.register_forward_pre_hook(WideInputs(), with_kwargs=True)
    model.register_forward_hook(OwnOutputs(dtype(entry["half"]), kinds, {}))
    note_half(model)
