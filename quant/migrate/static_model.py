"""Static torch.ao models: a static conversion of the float model with their weights and their activations' ranges.

Recurrent and embedding layers that are dynamic in it are dynamic here too.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.artefact.rebuild import Known
from quant.convert import convert
from quant.fusion.fuse import fuse_again
from quant.fusion.fused_graph import Slot
from quant.graph import Kind
from quant.migrate.dynamic_layers import setting_of, take_over
from quant.migrate.matched_values import MatchedValues
from quant.migrate.packed_layers import Layer, Product
from quant.migrate.recorded_run import Range, RecordedRun
from quant.migrate.remarks import Remarks, resolution_remark
from quant.ops.conv import ConvTranspose
from quant.ops.operator import Clampable, Recurrent, Weighted
from quant.ops.step import Step
from quant.prepare import make_runner, planned
from quant.recipe import Pattern, QConfig, Recipe
from quant.runtime.arguments import Arguments
from quant.runtime.layers.weighted import QWeight, StaticLayer
from quant.runtime.names import full_name, has_submodule, submodule
from quant.static.dynamic_fallback import without_runner
from quant.static.runner import GraphRunner, runners
from quant.static.weights import folded_numbers

FLOAT = "torch.ao computes it in float"
DYNAMIC = "dynamic in torch.ao"
ONCE = "its values are rounded once, where torch.ao rounds them twice"
FOLDED = "its output is multiplied by constants, which torch.ao has a range of its own for"


def static_model(
    run: RecordedRun,
    layers: Mapping[str, Layer],
    theirs: Mapping[str, str],
    float_model: nn.Module,
    example: tuple[Any, Arguments],
    backend: str | None,
    remarks: Remarks,
) -> nn.Module:
    """The static conversion of `float_model` with the integers of torch.ao's.

    Args:
        run: of torch.ao's model, on the example.
        layers: its layers, by their names in the float model.
        theirs: their names in torch.ao's, where these differ.
        float_model: with torch.ao's values of what it left float.
        example: inputs, as `prepare` takes them and as a call does.
        remarks: gets what is to be said.
    """
    rules: dict[Pattern, QConfig | None] = {glob.escape(name): _setting(one) for name, one in layers.items()}
    recipe = Recipe(rules, default=None, backend=backend)
    prepared = planned(float_model, example[0], recipe, make_runner, "quant.from_torch_ao")
    for runner in runners(prepared).values():
        _Unit(runner, recipe, run, layers, theirs, remarks).take_over()
    model = convert(prepared, backend)
    dynamic = {name: one for name, one in layers.items() if not _is_static(one)}
    take_over(model, dynamic, remarks)
    _note_floats(model, [name for name in layers if name not in dynamic], remarks)
    text = resolution_remark(run.ranges.values())
    remarks.model += [text] if text else []
    return model


def _is_static(layer: Layer) -> bool:
    return isinstance(layer, Product) and not layer.dynamic


def _setting(layer: Layer) -> QConfig | None:
    if not isinstance(layer, Product):
        return setting_of(layer)
    return None if layer.dynamic else QConfig(bias_correction=False, per_channel=layer.weight(0).per_channel)


def _note_floats(model: nn.Module, names: list[str], remarks: Remarks) -> None:
    for name in names:
        if not isinstance(submodule(model, name) if has_submodule(model, name) else None, StaticLayer):
            remarks.add(name, "int8 in torch.ao; its weights here are the float model's")


class _Unit:
    """One captured module of the prepared float model, which gets the numbers of a run."""

    def __init__(
        self,
        runner: GraphRunner,
        recipe: Recipe,
        run: RecordedRun,
        layers: Mapping[str, Layer],
        theirs: Mapping[str, str],
        remarks: Remarks,
    ) -> None:
        self.runner, self.recipe, self.run = runner, recipe, run
        self.layers, self.remarks = layers, remarks
        self.root = without_runner(runner.root)
        self.matched = MatchedValues(runner.graph, self.root, run, theirs)

    def take_over(self) -> None:
        """Leave float what is float in torch.ao, and give the rest its ranges and weights."""
        self._leave(self._dynamic())
        self._leave(self._multiplications())
        self._leave(self._multiplied())
        while unknown := [slot for slot in self.runner.fused.slots.values() if not self._ranges(slot)]:
            self._leave(self._readers(unknown))
        for name, slot in self.runner.fused.slots.items():
            values = self._ranges(slot)
            known = values[max(values)]  # of a concatenation, not of what it joins
            self.runner.set_observer(name, Known(*known.numbers))
            self._note_range(slot, known)
        self.runner.int8_weights = {
            step.name: self._weight(step, layer)
            for step in self.runner.fused.steps
            if isinstance(step.operator, Weighted) and isinstance(layer := self._layer(step), Product)
        }

    def _leave(self, floats: Mapping[str, str]) -> None:
        """Fuse again with more steps in float."""
        fused = self.runner.fused
        if not floats:
            return
        if not floats.keys() - fused.floats.keys():
            raise ValueError(
                f"quant.from_torch_ao: {', '.join(floats)}: torch.ao's model has no range for what these steps read, "
                "and they cannot be left float; quantise the float model anew with quant.quantize_static"
            )
        again = fuse_again(fused, self.root, self.recipe, floats)
        self.runner.use(again, {name: Known(1.0, 0) for name in again.slots})

    def _name(self, step: Step) -> str:
        """What a step is called in `FusedGraph.floats`."""
        node = self.runner.graph.nodes[step.nodes[0]]
        return str(node.target) if node.kind is Kind.MODULE else step.name

    def _full_name(self, step: Step) -> str:
        return full_name(self.runner.graph.path, self._name(step))

    def _layer(self, step: Step) -> Layer | None:
        is_module = self.runner.graph.nodes[step.nodes[0]].kind is Kind.MODULE
        return self.layers.get(self._full_name(step)) if is_module else None

    def _dynamic(self) -> dict[str, str]:
        steps = [step for step in self.runner.fused.steps if isinstance(step.operator, Recurrent)]
        return {self._name(step): DYNAMIC for step in steps}

    def _multiplications(self) -> dict[str, str]:
        """The products and sums with constants that are folded into layers, and have ranges of their own there."""
        nodes = self.runner.graph.nodes
        return {
            nodes[index].label: FOLDED
            for step in self._steps_with_factors()
            for index in step.nodes[1:]
            if self.matched.computes(index) and nodes[index].kind is not Kind.MODULE
        }

    def _multiplied(self) -> dict[str, str]:
        return {self._name(step): FOLDED for step in self._steps_with_factors()}

    def _steps_with_factors(self) -> list[Step]:
        steps = self.runner.fused.steps
        return [step for step in steps if isinstance(step.operator, Weighted) and step.operator.affine]

    def _readers(self, slots: list[Slot]) -> dict[str, str]:
        """The integer steps that read values of these slots."""
        values = {value for slot in slots for value in slot.values}
        steps = self.runner.fused.steps
        return {self._name(step): FLOAT for step in steps if step.integer and values.intersection(step.inputs)}

    def _ranges(self, slot: Slot) -> dict[int, Range]:
        """torch.ao's ranges of a slot's values; none where it has none."""
        values = {value: self.matched.value(value) for value in slot.values}
        return {value: self.run.ranges[own] for value, own in values.items() if own in self.run.ranges}

    def _note_range(self, slot: Slot, known: Range) -> None:
        makers = {step.output: step for step in self.runner.fused.steps}
        for value in slot.values:
            name = self._full_name(makers[value])
            others = (self.matched.value(index) for index in makers[value].nodes)
            if any(self.run.ranges[one].numbers != known.numbers for one in others if one in self.run.ranges):
                self.remarks.add(name, f"{ONCE}, by the range of {slot.name}")
        for value in slot.values:
            operator = makers[value].operator
            if isinstance(operator, Clampable) and operator.clamp is not None:
                self.remarks.add(self._full_name(makers[value]), _unused_steps(operator.clamp, known))

    def _weight(self, step: Step, layer: Product) -> QWeight:
        weight = layer.weight(1 if isinstance(step.operator, ConvTranspose) else 0)
        self.remarks.add(self._full_name(step), "the integers of torch.ao's weight")
        self.remarks.add(self._full_name(step), weight.remark)
        scale = weight.rows(step.weighted.output_first(weight.q_weight).shape[0])
        q = QWeight(weight.q_weight, scale, layer.bias)
        norm = step.weighted.batch_norm
        if norm is None or not self.matched.computes(norm):
            return q
        numbers = folded_numbers(step, self.runner.graph, self.root)
        assert numbers is not None
        self.remarks.add(self._full_name(step), "the batch norm that torch.ao kept apart is folded into its scale")
        return _with_norm(q, step.weighted, *numbers)


def _with_norm(q: QWeight, layer: Weighted, gain: Tensor, shift: Tensor) -> QWeight:
    """The same integers, but for their signs, with a batch norm in scale and bias: gain (s q x + b) + shift."""
    rows = layer.output_first(q.q_weight)
    signs = torch.sign(gain).to(torch.int16).reshape(-1, *[1] * (rows.dim() - 1))
    signed = (rows.to(torch.int16) * signs).clamp(-127, 127).to(torch.int8)
    scale = torch.where(gain == 0, 1.0, q.scale * gain.abs())
    bias = shift if q.bias is None else q.bias * gain + shift
    return QWeight(layer.as_layer(signed).contiguous(), scale, bias)


def _unused_steps(clamp: tuple[float, float], known: Range) -> str:
    """For the report: that torch.ao has not fused a clamp, whose output has steps that nothing falls into."""
    low = max(clamp[0], -known.zero_point * known.scale)
    high = min(clamp[1], (255 - known.zero_point) * known.scale)
    unused = 255 - round((high - low) / known.scale)
    return f"torch.ao did not fuse its clamp: {unused} of 255 steps of its range are unused" if unused > 1 else ""
