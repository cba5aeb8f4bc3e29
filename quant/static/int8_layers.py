"""The int8 layers of a conversion: one per weighted or recurrent module or functional call, with a site per call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quant.fusion.fused_graph import FusedGraph
from quant.graph import Kind
from quant.int8_classes import Maker
from quant.kernels import QParams
from quant.nn.base import adopt
from quant.nn.inherited import inherit
from quant.ops.operator import Weighted
from quant.ops.registered import Registered
from quant.ops.step import Step, is_recurrent
from quant.runtime.keys import LayerKey, ProgramKey
from quant.runtime.layers.static_module import StaticQuantModule
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.names import attribute, child_name, full_name
from quant.runtime.programs import RESERVED
from quant.static.assembly import Site
from quant.static.int8_recurrent import static_recurrent
from quant.static.native import Unscheduled
from quant.static.registered_layers import placed, registered_layer
from quant.static.report_entries import (
    Entries,
    note_folded,
    note_weighted,
    recurrent_entry,
    registered_entry,
    weighted_entry,
)
from quant.static.runner import GraphRunner
from quant.static.weights import folded_numbers, quantized


class Built:
    """The float layers of all captured units as they were, and the int8 ones built of them so far.

    Attributes:
        originals: by program and name within its module.
        layers: int8 ones by what they were built of.
        smallest: the smallest scale among a layer's inputs, by its identity (`_layer`), over all units.
        folded: the gain and shift folded into a step, by the step's identity.
        called: the modules that some unit calls, other than as what is folded into a weight.
        unscheduled: the programs up to now.
    """

    def __init__(self, programs: dict[ProgramKey, GraphRunner], ranges: dict[ProgramKey, dict[str, QParams]]) -> None:
        self.originals: dict[tuple[ProgramKey, str], nn.Module] = {}
        self.layers: dict[int, nn.Module] = {}
        self.smallest: dict[int, torch.Tensor] = {}
        self.folded: dict[int, Any] = {}
        self.called: set[nn.Module] = set()
        self.unscheduled: list[Unscheduled] = []
        for program, runner in programs.items():
            norms = {one.operator.batch_norm for one in runner.fused.steps if isinstance(one.operator, Weighted)}
            self.called |= {
                attribute(runner.root, node.target)
                for node in runner.graph.nodes
                if node.kind is Kind.MODULE and node.index not in norms
            }
            for step in runner.fused.steps:
                if step.integer:
                    self.folded[id(step)] = [_called(runner, index) for index in step.nodes[1:]]
                node = runner.graph.nodes[step.nodes[0]]
                if step.integer and node.kind is Kind.MODULE:
                    self.originals[program, node.target] = attribute(runner.root, node.target)
                if isinstance(step.operator, Weighted):
                    layer, scale = _layer(step, runner), ranges[program][runner.fused.slot_of[step.inputs[0]]].scale
                    self.smallest[layer] = torch.minimum(scale, self.smallest.get(layer, scale))

    def identity(self, step: Step, runner: GraphRunner, original: nn.Module | None) -> int:
        """The identity of a step's int8 layer, the same in all programs of a module.

        Two captured units may call one module, with its batch norm folded in one of them only: two weights then.
        """
        if original is None:
            return _layer(step, runner)
        folded = repr(self.folded[id(step)] if step.weighted.is_folded else None)
        return hash((id(original), folded, step.reads_two_bytes))


def _layer(step: Step, runner: GraphRunner) -> int:
    """The identity of a weighted step's layer, the same in all units that call it: its module, or its calls."""
    node = runner.graph.nodes[step.nodes[0]]
    if node.kind is Kind.MODULE:
        return id(attribute(runner.root, node.target))
    return hash((id(runner.root), runner.fused.layer_of(step)))


def _called(runner: GraphRunner, index: int) -> Any:
    """The identity of a node's call, the same in all programs of a module."""
    node = runner.graph.nodes[index]
    target = id(attribute(runner.root, node.target)) if node.kind is Kind.MODULE else str(node.target)
    return id(runner.root), node.owner, target


def is_layer(runner: GraphRunner) -> bool:
    """Whether a captured unit is itself a layer that becomes int8."""
    nodes = (runner.graph.nodes[step.nodes[0]] for step in runner.fused.steps if step.integer)
    return any(node.kind is Kind.MODULE and not node.target for node in nodes)


def int8_layers(
    runner: GraphRunner,
    ranges: dict[str, QParams],
    backend: str | None,
    built: Built,
    entries: Entries,
    program: ProgramKey,
) -> tuple[dict[LayerKey, nn.Module], dict[int, Site]]:
    """Build the int8 layers of one captured unit, or take those that another unit built from the same modules.

    Args:
        ranges: by slot of this unit's fused graph.
        built: of all units; new layers are added.
        entries: of the report; a line per layer is added.
        program: whose layers they are.

    Returns:
        the layers by key; and the call sites of weighted and registered steps, by the node of their output.

    Raises:
        ValueError: a recurrent or registered layer cannot be static; with its name.
    """
    fused, path = runner.fused, program.path
    layers: dict[LayerKey, nn.Module] = {}
    sites: dict[int, Site] = {}
    for step in fused.steps:
        if is_recurrent(step):
            key = LayerKey(fused.graph.nodes[step.nodes[0]].target)
            name = full_name(path, key.name)
            layers[key] = _recurrent_layer(step, fused, built.originals[program, key.name], ranges, built, name)
            layers[key].backend = backend or ""  # type: ignore[assignment]
            entries[name] = recurrent_entry(step, fused, ranges, layers[key], backend)
        if isinstance(step.operator, Registered):
            key = LayerKey(fused.graph.nodes[step.nodes[0]].target)
            x, y = ranges[fused.slot_of[step.inputs[0]]], _output_range(step, fused, ranges)
            make, name = step.operator.make, full_name(path, key.name)
            own = _registered_layer(step, built.originals[program, key.name], make, backend, built, name)
            layers[key], sites[step.output] = own, Site(key, own.add_site(x, y))
            if not key.name:
                own.own = sites[step.output].index
            entries[name] = registered_entry(step, x, y, own, backend)
        if not isinstance(step.operator, Weighted):
            continue
        node = fused.graph.nodes[step.nodes[0]]
        is_module = node.kind is Kind.MODULE
        key = LayerKey(node.target) if is_module else LayerKey(child_name(step.name), functional=True)
        original = built.originals[program, key.name] if is_module else None
        x = ranges[fused.slot_of[step.inputs[0]]]
        layer = layers[key] = _weighted_layer(step, runner, original, backend, built)
        layer.layer_name = layer.layer_name or full_name(path, key.name)
        y = _output_range(step, fused, ranges)
        sites[step.output] = Site(key, layer.add_site(x, y, step.weighted.clamp))
        if not key.name:
            layer.own = sites[step.output].index
        outcome, detail = weighted_entry(step, x, y, layer, backend)
        detail += ", rounded by its outputs" if step.name in runner.learned_weights else ""
        note_weighted(step, node, entries, path, (outcome, detail))
        note_folded(step, fused, entries, path)
    return layers, sites


def _weighted_layer(
    step: Step, runner: GraphRunner, original: nn.Module | None, backend: str | None, built: Built
) -> StaticLayer:
    """The int8 layer of a step's module `original`, or of a functional call, which has none."""
    # Two captured units may call one module, with its batch norm folded in one of them only: two weights then.
    identity = built.identity(step, runner, original)
    if identity not in built.layers:
        weight, fold = runner.int8_weights.get(step.name), None
        if weight is None:
            weight = runner.learned_weights.get(step.name)
            known = (runner.learned(step), runner.mean(step))
            smallest = built.smallest[_layer(step, runner)]
            weight = weight or quantized(step, runner.graph, runner.root, smallest, *known)
            assert step.qconfig is not None
            stored = step.weighted.int8().stored(weight.q_weight, step.qconfig.weight_bits)
            weight = replace(weight, q_weight=stored)
            fold = folded_numbers(step, runner.graph, runner.root)
        built.layers[identity] = StaticLayer(
            step.weighted.int8(), weight, backend, fold, 16 if step.reads_two_bytes else 8
        )
        if original is not None:
            inherit(built.layers[identity], original)
    layer = built.layers[identity]
    assert isinstance(layer, StaticLayer)
    return layer


def _output_range(step: Step, fused: FusedGraph, ranges: dict[str, QParams]) -> QParams | None:
    """The range that a step rounds its value to; None where it gives float32."""
    return ranges[fused.slot_of[step.output]] if fused.emits_integers(step) else None


def _registered_layer(
    step: Step, module: nn.Module, make: Maker, backend: str | None, built: Built, name: str
) -> StaticQuantModule:
    """The int8 layer of a module of a registered class, the same in all units."""
    if id(module) not in built.layers:
        assert step.qconfig is not None
        try:
            built.layers[id(module)] = placed(registered_layer(module, step.qconfig, make), module, name, backend)
        except ValueError as error:
            raise ValueError(f"layer '{name}': {error}") from error
    layer = built.layers[id(module)]
    assert isinstance(layer, StaticQuantModule)
    return layer


def _recurrent_layer(
    step: Step, fused: FusedGraph, module: nn.Module, ranges: dict[str, QParams], built: Built, name: str
) -> nn.Module:
    if id(module) not in built.layers:
        assert step.qconfig is not None
        inner = {one: ranges[slot] for one, slot in fused.inner_slots(step).items()}
        try:
            layer = static_recurrent(module, step.qconfig, ranges[fused.slot_of[step.inputs[0]]], inner)
        except ValueError as error:
            raise ValueError(f"layer '{name}': {error}") from error
        adopt(layer, module, name)
        layer.__dict__.pop("forward", None)  # of a layer that was captured by itself
        layer._modules.pop(RESERVED, None)
        built.layers[id(module)] = layer
    return built.layers[id(module)]
