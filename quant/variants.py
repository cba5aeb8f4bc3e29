"""Conversions of one calibrated model by other recipes, without capturing or calibrating it again.

Capture and calibration cost many runs of the float model; which layers are int8 is decided afterwards, when the graph
is read as steps. So a search over recipes prepares and calibrates once, with every layer quantised that may be, reads
the graphs again by each recipe, and gives each range the observer of the same values.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quant.calibrate import CalibrationWarning, DataError, run
from quant.calibrate.batches import Arguments, Caller, check_batches, check_limit, count_samples, describe, fingerprint
from quant.calibrate.checkpoint import observers_of
from quant.calibrate.driver import Forward
from quant.convert import convert
from quant.copying import copy_model
from quant.dynamic_decisions import TABLES, base_type
from quant.forward_state import keeping_children
from quant.fusion.fuse import fuse
from quant.fusion.fused_graph import FusedGraph, Slot
from quant.graph import Kind
from quant.kernels import narrow
from quant.observers import Observer
from quant.ops.step import Step
from quant.post_training import as_example
from quant.prepare import prepare, slot_observer
from quant.recipe import QConfig, Recipe
from quant.runtime.arguments import copied, copied_together
from quant.runtime.names import full_name
from quant.runtime.programs import RESERVED
from quant.smoothing.smooth import smoothed_model, some_batches
from quant.static.dynamic_fallback import dynamic_settings, without_runner
from quant.static.prepared import record_of
from quant.static.runner import GraphRunner, runners
from quant.submodule_calls import evaluating

KEPT = 4
"""Batches of the calibration data that stay in memory, to compare outputs on; of small ones more."""

SAMPLES, MOST_KEPT = 16, 16
"""Samples that they are to have, and batches at most: the noise of few samples differs by more than most layers do."""


@dataclass(frozen=True)
class Layer:
    """A layer that a recipe decides.

    Attributes:
        name: of its module, or of the module whose forward calls the functional layer.
        kind: the class of that module.
        qconfig: by the recipe that it was calibrated with.
        static: whether it has ranges of calibration; the others (embeddings, attention) become dynamic.
        weight_bytes: of the parameters in float32 or what they are stored in.
        columns: inputs of a linear layer, 0 of others.
        has_narrow_form: whether it is stored in 4 bits where its weight has these and it is dynamic.
    """

    name: str
    kind: str
    qconfig: QConfig
    static: bool
    weight_bytes: int
    columns: int = 0
    has_narrow_form: bool = False

    @property
    def pattern(self) -> str:
        """The pattern of a rule for this layer alone."""
        return glob.escape(self.name)


class Calibrated:
    """A float model, prepared and calibrated once, to be converted by any recipe.

    Attributes:
        model: the float model, which is not run here.
        probe: a copy to run, in eval mode: a forward may write into buffers.
        prepared: the calibrated copy.
        own_recipe: as given.
        recipe: with 16-bit activations where `quantize_static` gives them by itself (`quant/smoothing/`).
        example: inputs that it was captured with.
        kept: the first batches.
        calls: the arguments of the model's calls for these.
        layers: by name, in the order in which the model runs them.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Iterable[Any],
        verb: str,
        recipe: Recipe | None = None,
        *,
        forward: Forward | None = None,
        example_inputs: Any = None,
        limit: int | None = None,
        progress: bool = True,
    ) -> None:
        check_batches(data, verb, "data")
        check_limit(limit, verb)
        self.model, self.probe, self.own_recipe = model, copy_model(model), recipe or Recipe()
        some, data = some_batches(data, limit)
        self._data = hashlib.sha256()
        batches = map(self._noted, itertools.islice(data, limit))
        self.kept = list(_first(batches))
        self.calls = self._called(verb, forward)
        if not self.calls:
            raise DataError(f"{verb}: forward(model, batch) did not call model(...), whose outputs are to be compared")
        self.example = as_example(model, *self.calls[0]) if example_inputs is None else example_inputs
        smoothed = smoothed_model(model, some, self.own_recipe, forward)
        self.recipe = smoothed.recipe
        self.prepared = prepare(smoothed.model, self.example, self.recipe)
        record_of(self.prepared).measured = smoothed.notes
        if observers_of(self.prepared):  # a model of embeddings alone has none
            with keeping_children(self.prepared):
                run(self.prepared, itertools.chain(self.kept, batches), forward=forward, progress=progress)
        self.layers = {layer.name: self._named(layer) for layer in layers_of(self.prepared)}

    @property
    def data(self) -> str:
        """A hash of all batches that were taken."""
        return self._data.hexdigest()

    def _noted(self, batch: Any) -> Any:
        self._data.update(fingerprint(batch))
        return batch

    def _named(self, layer: Layer) -> Layer:
        """A layer with its class in the user's model, and what follows from that."""
        module = self.model.get_submodule(layer.name)
        columns = module.in_features if isinstance(module, nn.Linear) and base_type(module) is nn.Linear else 0
        narrow_form = narrow.fits(columns, 4) or base_type(module) in TABLES
        return replace(layer, kind=type(module).__name__, columns=columns, has_narrow_form=narrow_form)

    def _called(self, verb: str, forward: Forward | None) -> list[Arguments]:
        """The calls of the model for the kept batches, once there are some and the model takes them."""
        if not self.kept:
            raise DataError(f"{verb}: data is empty; give some hundred samples of real inputs in several batches")
        if len(self.kept) == 1:
            warnings.warn(
                f"{verb}: data has a single batch, {describe(self.kept[0])}: ranges follow these samples alone; some "
                "hundred samples in several batches are better",
                CalibrationWarning,
                stacklevel=5,
            )
        with torch.no_grad(), evaluating(self.probe):
            try:
                if forward is not None:
                    calls = self._noted_calls(forward)
                    self._data.update(b"".join(map(fingerprint, calls)))
                    return calls
                caller = Caller(self.model)
                calls = [caller.arguments(batch) for batch in self.kept]
                args, kwargs = copied(calls[0])
                self.probe(*args, **kwargs)
                return calls
            except Exception as error:
                raise DataError(
                    f"{verb}: the model fails on the first batch, {describe(self.kept[0])}: {type(error).__name__}: "
                    f"{' '.join(str(error).split())}; data is to give what the model takes, or (input, label) pairs, "
                    "not labels alone; where the model is not simply called with a batch, give forward="
                ) from error

    def _noted_calls(self, forward: Forward) -> list[Arguments]:
        """The calls of the model that the user's `forward` makes for the kept batches, in order."""
        calls: list[Arguments] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(copied((args, kwargs)))

        hook = self.probe.register_forward_pre_hook(note, with_kwargs=True)
        try:
            for batch in self.kept:
                forward(self.probe, copied_together(batch))
        finally:
            hook.remove()
        return calls

    def recipe_with(self, choices: Mapping[str, QConfig | None]) -> Recipe:
        """The recipe with other settings for some layers; None leaves a layer float."""
        rules = [(self.layers[name].pattern, qconfig) for name, qconfig in choices.items()]
        return Recipe([*rules, *self.recipe], default=self.recipe.default, backend=self.recipe.backend)

    def recipe_of_only(self, names: Iterable[str], settings: Mapping[str, QConfig] | None = None) -> Recipe:
        """The recipe by which these layers alone are quantised, by other settings where there are some."""
        chosen = settings or {}
        rules = [(self.layers[name].pattern, chosen.get(name, self.layers[name].qconfig)) for name in names]
        return Recipe(rules, default=None, backend=self.recipe.backend)

    def integer_layers(self, recipe: Recipe) -> set[str]:
        """The layers that compute in integers by a recipe, as far as ranges decide."""
        with reading_again(self.prepared, recipe):
            return {layer.name for layer in layers_of(self.prepared)}

    def converted(self, recipe: Recipe) -> nn.Module:
        """The int8 model by a recipe; what calibration warned of was said before."""
        with reading_again(self.prepared, recipe), warnings.catch_warnings():
            warnings.simplefilter("ignore", CalibrationWarning)
            return convert(self.prepared)


def _first(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches to compare outputs on."""
    samples = 0
    for index, batch in enumerate(itertools.islice(batches, MOST_KEPT)):
        samples += count_samples(batch)
        yield batch
        if index + 1 >= KEPT and samples >= SAMPLES:
            return


@contextlib.contextmanager
def reading_again(prepared: nn.Module, recipe: Recipe) -> Iterator[None]:
    """Let the graphs of a calibrated model be read by another recipe, which quantises no more than its own does."""
    info = record_of(prepared)
    own = info.recipe
    programs = [one for first in runners(prepared).values() for one in first.programs()]
    before = [(one, dict(vars(one)), one.observers) for one in programs]
    try:
        info.recipe = recipe
        for one in programs:
            _read_again(one, recipe)
        yield
    finally:
        info.recipe = own
        for one, attributes, observers in before:
            one.__dict__.update(attributes)
            one.observers = observers


def _read_again(runner: GraphRunner, recipe: Recipe) -> None:
    old = runner.fused
    root = without_runner(runner.root)  # a layer that is captured by itself is known by its own forward
    fused = fuse(old.graph, root, recipe, old.floats, old.rules)
    fused.shared = old.shared
    observers = {name: _observer(slot, old, runner) for name, slot in fused.slots.items()}
    columns = {value: runner.observers[key] for value, key in runner.columns.items()}
    runner.use(fused, observers)
    runner.known = None
    for value, observer in columns.items():
        runner.watch_columns(value, observer)


def _observer(slot: Slot, old: FusedGraph, runner: GraphRunner) -> nn.Module:
    """The observer of a slot: that of the same values; for 16 bits the extremes that it saw, as `prepare` observes."""
    name = old.slot_like(slot)
    own = runner.observer(name)
    if not slot.two_bytes or old.slots[name].two_bytes or not isinstance(own, Observer):
        return own
    finer = slot_observer(slot)
    if type(finer) is type(own):
        return own
    state = own.state_dict()
    finer.load_state_dict({key: state[key] for key in finer.state_dict()})
    finer.name, finer.given = own.name, own.given
    return finer


def layers_of(prepared: nn.Module) -> Iterator[Layer]:
    """The layers of a prepared model that a recipe decides, each once, in the order of their first calls."""
    modules, seen = dict(prepared.named_modules(remove_duplicate=False)), set[str]()
    for path, first in runners(prepared).items():
        for runner in first.programs():
            for step in runner.fused.steps:
                name = full_name(path, module_name(step, runner))
                if step.integer and step.qconfig is not None and name not in seen:
                    seen.add(name)
                    yield _layer(name, modules[name], step.qconfig, static=True)
    for name, qconfig in dynamic_settings(prepared, record_of(prepared)).items():
        if name not in seen:
            yield _layer(name, modules[name], qconfig, static=False)


def module_name(step: Step, runner: GraphRunner) -> str:
    """The module whose rule decides a step, by its name within the captured module."""
    node = runner.graph.nodes[step.nodes[0]]
    return str(node.target) if node.kind is Kind.MODULE else node.owner


def _layer(name: str, module: nn.Module, qconfig: QConfig, *, static: bool) -> Layer:
    own = [tensor for key, tensor in module.named_parameters() if RESERVED not in key]
    return Layer(name, type(module).__name__, qconfig, static, sum(one.numel() * one.element_size() for one in own))
