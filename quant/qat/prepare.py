"""`prepare_qat`: a copy of the user's model with fake quantisation, for training."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quant.calibrate import CalibrationWarning
from quant.copying import copy_model
from quant.further_programs import Extender
from quant.fusion.fuse import fuse_again
from quant.fusion.fused_graph import FusedGraph
from quant.graph import Kind
from quant.leaves import is_dynamic
from quant.observers import NoDataSeen, Observer
from quant.observers.fake_quantize import FakeQuantizeBase
from quant.ops.operator import Weighted
from quant.ops.step import Step
from quant.prepare import checked
from quant.qat.fake_quantizers import activation_quantizer, weight_key, weight_quantizer
from quant.qat.learned_start import start_from_learned
from quant.qat.runner import TrainingRunner
from quant.recipe import QConfig, Recipe, RecipeError
from quant.recipe_check import check_observers
from quant.runtime.layers.weighted import QWeight
from quant.runtime.names import attribute, full_name
from quant.runtime.programs import RESERVED
from quant.runtime.trees import Attr
from quant.static.prepared import record_of
from quant.static.runner import GraphRunner, all_runners, remove_programs, runners
from quant.static.weights import folded
from quant.waiting_forwards import stop_waiting


@torch.inference_mode(False)
def prepare_qat(
    model: nn.Module, example_inputs: Any = None, recipe: Recipe | None = None, *, examples: Sequence[Any] = ()
) -> nn.Module:
    """A copy of `model` with fake quantisation, to be trained as any module and then converted.

    The copy has the user's classes, parameters and names, so that a float checkpoint loads into it; what quantisation
    adds has `_quant` in its name. (What torch's hooks compute, as the older weight norm and pruning do, is a
    parametrization of the same parameters.) Give its parameters, not the model's, to the optimiser. In eval mode it
    computes what `quant.convert` will give, within one step of rounding per layer. Ranges are moving averages of each
    batch's, unless the recipe says otherwise: `QConfig(activation_observer=...)` takes "minmax", "fixed", and "lsq",
    "lsq+" and "pact", which learn them, as `weight_observer=...` does. A weight's range follows the weight.

    Args:
        model: a float module, left as it is; or a model from `quant.prepare`, whose ranges are where training starts,
            and the integers too that `quant.learn_rounding` chose.
        example_inputs: as for `quant.prepare`; not needed for a model that is prepared already.
        recipe: as for `quant.prepare`. A calibrated model has one already; another may give its layers the observers of
            training, as "lsq", whose scales then begin with the calibrated ranges, and those of weights with the scales
            that `quant.learn_rounding` chose. Everything else has to be as it is there.
        examples: more inputs, of calls of other structures, as for `quant.prepare`.

    Raises:
        TypeError, RecipeError, NothingQuantized: as `quant.prepare`; RecipeError also for an activation_observer that
            searches for its range, which a calibrated model may have used.
        ValueError: the model is prepared for training already, or is not calibrated, or a layer's weight is not a
            parameter (a hook computes it).
    """
    if isinstance(model, nn.Module) and runners(model):
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"quant.prepare_qat: expected a quant.Recipe, got {type(recipe).__name__}")
        if recipe is not None:
            check_observers(recipe, "quant.prepare_qat", training=True)
        return _from_calibrated(model, recipe)
    if example_inputs is None:
        raise TypeError("quant.prepare_qat: a float model needs example_inputs, as quant.prepare does")
    recipe = recipe or Recipe()

    make = functools.partial(_make_runner, recipe=recipe)
    prepared = checked(model, example_inputs, recipe, make, "quant.prepare_qat", training=True, examples=examples)
    _name(prepared)
    return prepared


def _from_calibrated(model: nn.Module, recipe: Recipe | None) -> nn.Module:
    if any(isinstance(runner, TrainingRunner) for runner in runners(model).values()):
        raise ValueError("quant.prepare_qat: the model is prepared for training already; train it as it is")
    prepared = copy_model(model, training=True)
    stop_waiting(prepared)
    _start_from_learned(prepared)
    info = record_of(prepared)
    info.recipe = info.recipe if recipe is None else recipe
    make = functools.partial(_make_runner, recipe=info.recipe)
    state: dict[str, Any] = {}  # training keeps its own
    extender = Extender(info.recipe, info.islands, info.called, state, True, make, info.halves)
    for path, runner in runners(prepared).items():
        programs = runner.programs()
        remove_programs(runner)
        fused = {one: one.fused if recipe is None else _fused_again(one, recipe) for one in programs}
        extender.install(runner.root, fused[runner])
        first = runner.root._modules[RESERVED]
        assert isinstance(first, TrainingRunner)
        for one in programs:
            trainer = first if one is runner else extender.add(first, fused[one])
            trainer.example = one.example
            ranges = _ranges(one, path)
            for slot in trainer.fused.slots.values():
                quantizer = trainer.observer(slot.name)
                assert isinstance(quantizer, FakeQuantizeBase)
                quantizer.start(*ranges[one.fused.slot_like(slot)])
            _start_weight_scales(trainer, one.learned_weights)
    _name(prepared)
    return prepared


def _start_from_learned(prepared: nn.Module) -> None:
    """Take over the rounding that `learn_rounding` chose, and warn of layers where that cannot be."""
    paths = {id(runner): key.path for key, runner in all_runners(prepared).items()}
    left: dict[str, dict[str, None]] = {}
    for runner, name, why in start_from_learned(all_runners(prepared).values()):
        left.setdefault(why, {})[full_name(paths[id(runner)], name)] = None
    if left:
        said = "; ".join(f"{', '.join(names)}: {why}" for why, names in left.items())
        warnings.warn(
            "quant.prepare_qat: the rounding that quant.learn_rounding chose is not taken over for some layers, whose "
            f"training begins with their float weights, rounded to nearest: {said}",
            CalibrationWarning,
            stacklevel=5,
        )


def _fused_again(runner: GraphRunner, recipe: Recipe) -> FusedGraph:
    """The fused graph of a calibrated module by a recipe with other observers.

    Raises:
        RecipeError: it differs in more.
    """
    old = runner.fused
    fused = fuse_again(old, runner.root, recipe, {})
    if [step.nodes for step in fused.steps] != [step.nodes for step in old.steps]:
        raise RecipeError(f"quant.prepare_qat: {_OTHER_RECIPE}; it computes other layers in integers")
    for step, before in zip(fused.steps, old.steps, strict=True):
        one, other = (None if each.qconfig is None else _without_observers(each.qconfig) for each in (step, before))
        if (one, step.integer) != (other, before.integer):
            raise RecipeError(
                f"quant.prepare_qat: {_OTHER_RECIPE}; layer '{full_name(old.graph.path, step.name)}' has {one} here "
                f"and {other} there"
            )
    return fused


_OTHER_RECIPE = "the recipe may change the observers of a calibrated model, and nothing else"


def _without_observers(qconfig: QConfig) -> QConfig:
    usual = QConfig()
    names = ("weight_observer", "weight_options", "activation_observer", "activation_options")
    return replace(qconfig, **{name: getattr(usual, name) for name in names})


def _start_weight_scales(trainer: Any, learned_weights: Mapping[str, QWeight]) -> None:
    """Begin learned scales of weights with those of the integers that `learn_rounding` chose.

    Others are set at the first batch, as LSQ has it: finer than the range of the largest weight, which few bits want.
    """
    for step in trainer.fused.steps:
        quantizer = trainer.weight_quantizer(step) if isinstance(step.operator, Weighted) else None
        learned = learned_weights.get(step.name)
        if quantizer is not None and learned is not None:
            top = learned.scale * quantizer.scheme.quant_max
            top = top if quantizer.scheme.axis is not None else top.amax()
            quantizer.start(-top, top)


def _ranges(runner: GraphRunner, path: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    ranges = {}
    for slot in runner.fused.slots:
        observer = runner.observer(slot)
        assert isinstance(observer, Observer)
        try:
            ranges[slot] = observer.range()
        except NoDataSeen as error:
            name = full_name(path, slot)
            raise ValueError(
                f"quant.prepare_qat: the observer of '{name}' saw no data; calibrate the prepared model first, or "
                "start from the float model"
            ) from error
    return ranges


def _make_runner(module: nn.Module, fused: FusedGraph, recipe: Recipe) -> TrainingRunner:
    """The runner of a captured module for training."""
    activations: dict[str, nn.Module] = {
        slot.name: activation_quantizer(slot, slot.name) for slot in fused.slots.values()
    }
    weights: dict[str, nn.Module] = {}
    for step in fused.steps:
        if not isinstance(step.operator, Weighted):
            continue
        _refuse_hooked(step, fused, module)
        weight = folded(step, fused.graph, module)[0]
        quantizer = weight_quantizer(step, step.weighted.output_first(weight).shape[0], step.name)
        if quantizer is not None:
            weights.setdefault(weight_key(step, fused), quantizer)
    return TrainingRunner(module, fused, activations, weights, _dynamic(module, fused, recipe))


def _refuse_hooked(step: Step, fused: FusedGraph, root: nn.Module) -> None:
    """Raise for a weight that a hook computes before each call: it would keep its last value and not be trained."""
    source = step.weighted.weight
    if not isinstance(source, Attr):
        return
    owner = root.get_submodule(source.path.rpartition(".")[0])
    if owner._forward_pre_hooks and not isinstance(attribute(root, source.path), nn.Parameter):
        name = full_name(fused.graph.path, step.name)
        raise ValueError(
            f"quant.prepare_qat: layer '{name}': its weight is computed by a hook (as by torch.nn.utils.weight_norm), "
            "which does not run in training for int8; use torch.nn.utils.parametrizations, or leave the layer float"
        )


def _dynamic(module: nn.Module, fused: FusedGraph, recipe: Recipe) -> dict[str, QConfig]:
    """The settings of the modules that convert will make dynamic."""
    settings: dict[str, QConfig] = {}
    for node in fused.graph.nodes:
        if node.kind is not Kind.MODULE or not is_dynamic(module.get_submodule(node.target)):
            continue
        if getattr(module.get_submodule(node.target), "max_norm", None) is not None:  # which convert leaves float
            continue
        name = full_name(fused.graph.path, node.target)
        qconfig = recipe.resolve(name, module.get_submodule(node.target))[0]
        if qconfig is not None:
            settings[node.target] = qconfig
    return settings


def _name(prepared: nn.Module) -> None:
    """Give every fake quantiser the full name of its layer, for messages."""
    for path, runner in runners(prepared).items():
        for module in runner.modules():
            if isinstance(module, (FakeQuantizeBase, Observer)) and path:
                module.name = f"{path}.{module.name}"
