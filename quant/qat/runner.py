"""Runs a captured module in training: as its int8 form will compute it, in float and with gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quant.folding import is_own_norm, norm_of
from quant.fusion.fused_graph import FusedGraph
from quant.fusion.last_readers import last_readers
from quant.graph import Kind, Node, arguments_of, evaluate
from quant.kernels.scheme import SCALE_MIN
from quant.observers.fake_quantize import NO_CLAMP, FakeQuantize, FakeQuantizeBase
from quant.ops.operator import Clampable, Weighted
from quant.ops.recurrent import Cell
from quant.ops.registered import Registered
from quant.ops.step import Step, is_recurrent
from quant.qat import batch_norm
from quant.qat.dynamic import call_rounded
from quant.qat.fake_quantizers import SharedFakeQuantize, values_of, weight_key
from quant.qat.finite_inputs import finite_inputs
from quant.qat.ranks import warn_of_ranks
from quant.qat.recurrent import trained
from quant.qat.weights import folded_and_rounded, rounded_bias, rounded_weight, straight_through
from quant.recipe import QConfig
from quant.runtime import nonfinite
from quant.runtime.names import attribute
from quant.runtime.outputs import finished
from quant.runtime.trees import map_leaves
from quant.runtime.uncaptured import UncapturedCall
from quant.runtime.write_rollback import undone_at_mismatch
from quant.static.registered_layers import simulated_registered
from quant.static.runner import GraphRunner, is_replaying, output_of, replaying, seen_by
from quant.static.weights import folded, folded_bias, row_scale

SWITCHES = ("rounding", "norms_frozen")


class TrainingRunner(GraphRunner):
    """A GraphRunner with fake quantisers in the place of observers, and with rounded weights.

    Attributes:
        weights: `weight_key` -> the fake quantiser of a weight with a learned scale.
        dynamic: path of a module that convert makes dynamic -> its settings.
        synced: whether ranges are those of all ranks' data; None where this was not set.

    Buffers:
        rounding: bool scalar, whether weights are rounded. True at first. Fake quantisers have a switch of their own.
        norms_frozen: bool scalar, whether batch norms use their running statistics in training mode. False at first.
    """

    rounding: Tensor
    norms_frozen: Tensor

    def __init__(
        self,
        root: nn.Module,
        fused: FusedGraph,
        observers: dict[str, nn.Module],
        weights: dict[str, nn.Module],
        dynamic: dict[str, QConfig],
    ) -> None:
        super().__init__(root, fused, observers)
        self.weights = nn.ModuleDict(weights)
        self.dynamic = dynamic
        self.synced: bool | None = None
        self.register_buffer("rounding", torch.ones((), dtype=torch.bool))
        self.register_buffer("norms_frozen", torch.zeros((), dtype=torch.bool))
        self._known = {"rounding": True, "norms_frozen": False}
        self._places = {
            value: (slot.name, place) for slot in fused.slots.values() for place, value in enumerate(slot.observed)
        }
        self._before: dict[str, int] = {}
        self._dead, self._both = last_readers(fused), fused.read_both_ways()
        self._first: tuple[GraphRunner, ...] = (self,)
        self._untrained: bool | None = None
        weighted = [step for step in fused.steps if isinstance(step.operator, Weighted)]
        self._keys = {step.nodes[0]: weight_key(step, fused) for step in weighted}
        self._inputs = {step.output: [call.inputs[0] for call in fused.calls_of_layer(step)] for step in weighted}
        self._bare = {step.output: replace(step, operator=replace(step.weighted, batch_norm=None)) for step in weighted}

    def switch(self, name: str, on: bool) -> None:
        """Set `rounding` or `norms_frozen`."""
        self._buffers[name].fill_(on)  # type: ignore[union-attr]
        self._known[name] = on

    def is_on(self, name: str) -> bool:
        """The value of `rounding` or `norms_frozen` as last set or loaded; reading the buffer would wait for a GPU."""
        return self._known[name]

    def train(self, mode: bool = True) -> TrainingRunner:
        super().train(mode)
        self._read_switches()
        self._untrained = None
        return self

    def run_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.simulate or is_replaying():
            return super().run_program(args, kwargs)
        if not self.training and self._is_untrained():
            return self._run_untrained(args, kwargs)
        if self.training and self.synced is None:
            self.synced = False if warn_of_ranks(self.graph.path) else None
        values = finite_inputs(self, args, kwargs)
        if self.expected.written:
            output = undone_at_mismatch(self.expected.written, self.root, dict(values), lambda: self._train(values))
        else:
            output = self._train(values)
        return finished(output, self.root, args, kwargs)

    def follow(self, first: GraphRunner) -> None:
        assert isinstance(first, TrainingRunner)
        self._first = (first,)
        for name in ("rounding", "norms_frozen"):
            self.switch(name, first.is_on(name))
        known: dict[Hashable, nn.Module] = {}
        for program in first.programs():
            assert isinstance(program, TrainingRunner)
            known |= {layer: program.weights[key] for layer, key in program._learned_layers().items()}
        for layer, key in self._learned_layers().items():
            self.weights[key] = known.get(layer, self.weights[key])
        shared = set(first.observers.values())
        model = next((one for one in first.observers.values() if isinstance(one, FakeQuantizeBase)), None)
        for one in self.observers.values():
            if one not in shared and isinstance(one, FakeQuantizeBase) and model is not None:
                one.set_observing(bool(model.observing))
                one.set_quantizing(bool(model.quantizing))
        self.synced = first.synced
        self._join_ranges(first.programs())

    def number(self, slot: str, place: int) -> int:
        """The number of a slot's value in its `SharedFakeQuantize`, which may have values of other programs."""
        return self._before.get(slot, 0) + place

    @torch.inference_mode(False)
    def _join_ranges(self, others: Sequence[GraphRunner]) -> None:
        """Give this program's values moving ranges of their own in the fake quantisers that it shares with others."""
        for slot in self.fused.slots.values():
            quantizer = self.observer(slot.name)
            holders = [(one, name) for one in others for name in one.fused.slots if one.observer(name) is quantizer]
            if not holders:
                continue
            if isinstance(quantizer, FakeQuantize) and quantizer.observer.follows_batches:
                quantizer = SharedFakeQuantize.begun_as(quantizer)
                for one, name in (*holders, (self, slot.name)):
                    one.set_observer(name, quantizer)
            if isinstance(quantizer, SharedFakeQuantize):
                self._before[slot.name] = quantizer.values
                quantizer.grow(values_of(slot))

    def _is_untrained(self) -> bool:
        """Whether other programs of the module have seen data and this one has not, or not for all values."""
        if self._untrained is None:
            [first] = self._first
            programs = first.programs()
            self._untrained = len(programs) > 1 and not self.has_seen() and any(one.has_seen() for one in programs)
        return self._untrained

    def _run_untrained(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that occurs in eval mode only, as with a cache, in float; convert drops its program."""
        path, warned = self.graph.path or type(self.root).__name__, self._first[0].warned
        if path not in warned:
            warned.add(path)
            warnings.warn(
                f"{path}: no call like this one came in training, so its ranges are unknown and it runs in float; "
                "call it in training mode too, or the converted model will take ranges of each such call",
                UncapturedCall,
                stacklevel=4,
            )
        with replaying():
            return super().run_program(args, kwargs)

    def corrected(self) -> list[Step]:
        """None: the biases were trained with the rounded weights."""
        return []

    def learned(self, step: Step) -> Tensor | None:
        quantizer = self.weight_quantizer(step) if isinstance(step.operator, Weighted) else None
        if quantizer is None:
            return None
        compiling = torch.compiler.is_compiling()
        scale: Tensor = quantizer.current_scale() if compiling else quantizer.qparams().scale
        return scale.reshape(-1).expand(self._channels(step)).clone()

    def _train(self, values: dict[int, Any]) -> Any:
        rounded: dict[int, Any] = {}
        evaluates = not self.training and not torch.compiler.is_compiling()
        for step in self.fused.steps:
            seen = seen_by(step, values, rounded)
            if is_recurrent(step):
                if evaluates:
                    self.note_nonfinite(step, values)
                rounding = self.is_on("rounding")
                values.update(trained(self, step, seen, values, rounding=rounding, number=self.number))
                if isinstance(step.operator, Cell):  # the loop carries its state unrounded; other readers read integers
                    kept = rounded if step.output in self._both else values
                    kept[step.output] = self._observed(step, values[step.output], NO_CLAMP)
                continue
            clamp = NO_CLAMP
            if self.graph.nodes[step.output].kind is not Kind.INPUT:
                values[step.output], clamp = self._value(step, seen)
            value = values[step.output]
            if evaluates and step.output in self.fused.slot_of:
                self.note_nonfinite(step, values)
            if step.output in self._both:
                values[step.output] = value if clamp == NO_CLAMP else torch.clamp(value, *clamp)
                rounded[step.output] = self._observed(step, value, clamp)
            else:
                values[step.output] = self._observed(step, value, clamp)
            for dead in self._dead.get(step.output, ()):
                del values[dead]
                rounded.pop(dead, None)
        return nonfinite.spoiled(output_of(self.graph, values), values)

    def _value(self, step: Step, values: dict[int, Any]) -> tuple[Any, tuple[float, float]]:
        """A step's value, and the clamp that is still to be applied to it."""
        clamp = step.operator.clamp if isinstance(step.operator, Clampable) and len(step.nodes) > 1 else None
        if isinstance(step.operator, Weighted):
            return self._weighted(step, values), clamp or NO_CLAMP
        # A clamp that is the step's last node is applied with the rounding; one that is a step, a lookup, is not.
        nodes = step.nodes if clamp is None else step.nodes[:1]
        own: dict[int, Any] = {}
        if isinstance(step.operator, Registered) and self.is_on("rounding"):
            module, x = attribute(self.root, self.graph.nodes[nodes[0]].target), values[step.inputs[0]]
            try:
                own[nodes[0]] = simulated_registered(module, step.qconfig, step.operator.make, x, straight_through)
            except ValueError as error:
                raise ValueError(f"layer '{step.name}': {error}") from error
        for index in nodes[len(own) :]:
            node = self.graph.nodes[index]
            own[index] = self._evaluated(node, lambda i: own[i] if i in own else values[i])
        return own[nodes[-1]], clamp or NO_CLAMP

    def _evaluated(self, node: Node, value: Callable[[int], Any]) -> Any:
        """The value of a float call; layers that become dynamic use rounded weights."""
        if is_own_norm(node, self.graph):
            # Called as a module, which passes other settings in training mode than the captured call has.
            normalised: Tensor = norm_of(node.index, self.graph, self.root)(value(node.args[0].index))
            return normalised
        qconfig = self.dynamic.get(node.target) if node.kind is Kind.MODULE and self.is_on("rounding") else None
        if qconfig is None:
            return evaluate(node, self.root, value)
        args, kwargs = arguments_of(node, self.root, value)
        try:
            return call_rounded(attribute(self.root, node.target), qconfig, args, kwargs)
        except ValueError as error:
            raise ValueError(f"layer '{node.label}': {error}") from error

    def _observed(self, step: Step, value: Any, clamp: tuple[float, float]) -> Any:
        if step.output not in self._places:
            return value if clamp == NO_CLAMP else torch.clamp(value, *clamp)
        slot, place = self._places[step.output]
        quantizer = self.observer(slot)
        if isinstance(quantizer, SharedFakeQuantize):
            return quantizer.at(self.number(slot, place), value, clamp)
        if isinstance(quantizer, FakeQuantize):
            return quantizer(value, clamp)
        value = value if clamp == NO_CLAMP else torch.clamp(value, *clamp)
        return map_leaves(quantizer, value)

    def _weighted(self, step: Step, values: dict[int, Any]) -> Tensor:
        """The layer with its rounded weight and bias; with its batch norm, without its clamp."""
        x = values[step.inputs[0]]
        if not self.training:  # in training the error of 16 bits is nothing beside that of the weight
            x = self.split_finely(step, values.__getitem__)(step.inputs[0])
        place = step.weighted.batch_norm
        norm: Any = None if place is None else norm_of(place, self.graph, self.root)
        by_batch = batch_norm.uses_batch(norm, frozen=self.is_on("norms_frozen"))
        if not self.is_on("rounding"):
            return self._in_float(step, x, norm if by_batch else None)
        if not by_batch:
            weight, bias = folded(step, self.graph, self.root)
            weight, scale = self._rounded(step, weight, bias)
            bias = rounded_bias(bias, self._scale_of_call(step) * scale)
            return step.weighted.product(x, weight, bias)
        gain = batch_norm.folding_gain(norm)
        weight, own_bias = self._unfolded(step)
        with torch.no_grad():
            bias = folded_bias(step, self.graph, self.root)
        weight, _ = self._rounded(step, weight, bias, gain)
        a = step.weighted.product(x, weight, None)
        return batch_norm.normalise(step.name, norm, a, gain, own_bias)

    def _in_float(self, step: Step, x: Tensor, norm: Any) -> Tensor:
        if norm is None:
            return step.weighted.product(x, *folded(step, self.graph, self.root))
        y: Tensor = norm(step.weighted.product(x, *self._unfolded(step)))
        return y

    def _unfolded(self, step: Step) -> tuple[Tensor, Tensor | None]:
        return folded(self._bare[step.output], self.graph, self.root)

    def _rounded(
        self, step: Step, weight: Tensor, bias: Tensor | None, gain: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A weight folded, or to be folded by `gain`, rounded, and its scale (out,)."""
        quantizer = self.weight_quantizer(step)
        if quantizer is None:
            result = folded_and_rounded(weight, gain, bias, self._smallest(step), step)
            if result is not None:
                return result
        rows = step.weighted.output_first(weight)
        if gain is not None:
            rows = rows * gain.reshape(-1, *[1] * (rows.dim() - 1))
            weight = step.weighted.as_layer(rows)
        if quantizer is not None and self.training:
            rounded = step.weighted.as_layer(quantizer(rows))
            learned: Tensor = quantizer.current_scale()
            return rounded, learned.reshape(-1).expand(rows.shape[0])
        with torch.no_grad():
            known = None if bias is None else bias.detach()
            scale = row_scale(rows.detach(), known, self._smallest(step), step, self.learned(step))
        return rounded_weight(weight, scale, step), scale

    def _smallest(self, step: Step) -> Tensor:
        scales = [self._scale(value) for value in self._inputs[step.output]]
        if len(scales) == 1:
            return torch.where(torch.isfinite(scales[0]), scales[0], torch.inf)
        known = torch.stack(scales)
        counts = torch.isfinite(known) & ((known > SCALE_MIN) | (known <= SCALE_MIN).all())  # as `Ranges.qparams`
        return torch.where(counts, known, torch.inf).amin()

    def _scale_of_call(self, step: Step) -> Tensor:
        """The scale of a weighted step's input; where that was always zero, as `Ranges.qparams` chooses it, and 1 while
        no other call has one."""
        own = self._scale(step.inputs[0])
        if len(self._inputs[step.output]) == 1:
            return own
        smallest = self._smallest(step)
        return torch.where(own > SCALE_MIN, own, torch.where(torch.isfinite(smallest), smallest, 1.0))

    def _scale(self, value: int) -> Tensor:
        """The scale of a value that has a range, float32 (); NaN where another call of the layer comes later."""
        quantizer = self.observer(self.fused.slot_of[value])
        assert isinstance(quantizer, FakeQuantizeBase)
        return quantizer.current_scale()

    def weight_quantizer(self, step: Step) -> Any:
        """The fake quantiser that learns the scale of a weighted step; None where none does."""
        return self.weights._modules.get(self._keys[step.nodes[0]]) if len(self.weights) else None

    def _learned_layers(self) -> dict[Hashable, str]:
        """The layers whose weight's scale is learned, and their keys in `weights`."""
        keys = {self.fused.layer_of(step): self._keys[step.nodes[0]] for step in self.fused.steps
                if isinstance(step.operator, Weighted)}  # fmt: skip
        return {layer: key for layer, key in keys.items() if key in self.weights}

    def _channels(self, step: Step) -> int:
        return step.weighted.output_first(self._unfolded(step)[0]).shape[0]

    def _read_switches(self) -> None:
        for name in SWITCHES:
            buffer = self._buffers.get(name)
            if buffer is not None and buffer.device.type != "meta":
                self._known[name] = bool(buffer)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._read_switches()
        self._untrained = None
