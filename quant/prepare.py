"""Prepare: a copy of the user's model that watches its own activations, ready to be calibrated by just running it.

The copy has the user's classes, names and parameters; a captured module runs its graph instead of its forward, and
one more child holds the observers: a `GraphRunner`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quant import forward_state
from quant.calibrate import CalibrationWarning
from quant.called_later import LaterCalls
from quant.capture import as_arguments, capture
from quant.capture.recorded_modules import evaluating
from quant.capture.unlike_in_training import REASONS
from quant.capture.unlike_in_training import within as unlike_in_training
from quant.copying import copy_model
from quant.dynamic_decisions import NothingQuantized
from quant.further_programs import Extender, MakeRunner
from quant.fusion.fuse import fuse
from quant.fusion.fused_graph import RULES, FusedGraph, Slot
from quant.graph import Graph, Kind
from quant.half_precision import halves_of, widened
from quant.kernels import ACTIVATION_U8, QScheme
from quant.leaves import base_layer, is_dynamic
from quant.observers import AUTO, PER_CALL, Observer, make_observer
from quant.ops.operator import Recurrent, Weighted
from quant.ops.step import Step
from quant.recipe import Recipe, UnmatchedRules
from quant.recipe_check import asks_for_something, check_observers, check_settings
from quant.runtime.arguments import copied
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.names import full_name, has_attribute
from quant.runtime.programs import RESERVED
from quant.shared import note_shared, one_range_each
from quant.static.dynamic_fallback import dynamic_settings
from quant.static.examples import encode
from quant.static.outlier_check import suspects
from quant.static.prepared import Prepared, leave_record, record_of
from quant.static.runner import GraphRunner, all_runners, replaying, runners
from quant.uncompiled import is_compiled
from quant.waiting_forwards import stop_waiting
from quant.weight_check import check_weights
from quant.widening import widen

SYMMETRIC_U8 = QScheme(torch.uint8, 0, 255, symmetric=True)


@torch.inference_mode(False)
def prepare(
    model: nn.Module, example_inputs: Any, recipe: Recipe | None = None, *, examples: Sequence[Any] = ()
) -> nn.Module:
    """A copy of `model` with observers, to be calibrated by calling it and then converted.

    Args:
        model: any module, unedited; left as it is.
        example_inputs: a tensor, a tuple of positional arguments, a dict of keyword arguments, or both, as
            `inspect.signature(model.forward).bind(...)` gives them. They decide which branches on sizes are taken;
            batch size and image size stay free where the model leaves them free.
        recipe: which layers are quantised and how; None quantises everything that has an int8 kernel.
        examples: more inputs, of calls that `example_inputs` does not show: without a mask, with a cache, of a length
            at which the model decides otherwise. Each structure gets a program of its own. Calls that come in
            calibration and are unlike all of them do so too.

    Raises:
        TypeError: `model` is not a module.
        RecipeError: a rule matches no module, or asks for what calibration, or no layer of the rule, can use.
        NothingQuantized: no layer of the model can be, or may be, quantised; with the reasons.
        ValueError: a weight, or a norm's statistics, hold NaN or inf, or a variance is negative; with the layer's name.
    """
    recipe = recipe or Recipe()
    return checked(model, example_inputs, recipe, make_runner, "quant.prepare", training=False, examples=examples)


def checked(
    model: nn.Module,
    example_inputs: Any,
    recipe: Recipe,
    make: MakeRunner,
    verb: str,
    *,
    training: bool,
    examples: Sequence[Any] = (),
) -> nn.Module:
    """As `planned`, with errors for settings of the recipe that would not be used, and for weights that hold NaN."""
    if isinstance(recipe, Recipe):  # `planned` words the error
        check_observers(recipe, verb, training=training)
    prepared = planned(model, example_inputs, recipe, make, verb, training=training, examples=examples)
    called = record_of(prepared).called
    check_settings(prepared, recipe, called, verb)
    check_weights(prepared, called, verb, training=training)
    return prepared


def check_model(model: nn.Module, verb: str) -> None:
    """Refuse what has no float forward to capture."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{verb}: expected an nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule) or is_compiled(model):
        raise TypeError(
            f"{verb}: the model is compiled ({type(model).__name__}); quantise the module that was compiled, and "
            "compile the result"
        )
    if runners(model):
        raise ValueError(f"{verb}: the model is prepared already; prepare the float model it came from")
    if any(RESERVED + "_description" in vars(module) for module in model.modules()):
        raise ValueError(f"{verb}: the model is int8 already; start from the float model it came from")
    meta = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if meta:
        raise ValueError(
            f"{verb}: {', '.join(meta[:4])} are on the meta device, without values; load the weights first"
        )


def _check_rules(model: nn.Module, recipe: Recipe) -> None:
    """Raise UnmatchedRules for a rule that no module follows; an attention's projections follow the attention's."""
    modules = list(model.named_modules(remove_duplicate=False))
    parts = {
        id(part)
        for _, module in modules
        if base_layer(module) is nn.MultiheadAttention
        for part in module.modules()
        if part is not module
    }
    wholes = [(name, module) for name, module in modules if id(module) not in parts]
    unmatched = recipe.unmatched(wholes)
    if unmatched:
        raise UnmatchedRules(
            f"recipe: no module matches {'; '.join(map(str, unmatched))}; the model has "
            f"{[name for name, _ in wholes if name][:20]}"
            + (", and each MultiheadAttention is quantised as a whole" if parts else ""),
            [rule.pattern for rule in unmatched],
        )


def planned(
    model: nn.Module,
    example_inputs: Any,
    recipe: Recipe,
    make: MakeRunner,
    verb: str,
    *,
    training: bool = False,
    examples: Sequence[Any] = (),
    islands: Mapping[str, str] | None = None,
    rules: int = RULES,
) -> nn.Module:
    """A copy of `model` whose captured modules run their graphs; as `prepare`, for calibration or for training.

    Args:
        make: makes the runner of a captured module.
        verb: how errors call what the user called.
        training: whether gradients will be taken through the graphs.
        examples: inputs of calls of other structures, as for `prepare`.
        islands: as for `capture`.
        rules: as for `fuse`.
    """
    check_model(model, verb)
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{verb}: expected a quant.Recipe, got {type(recipe).__name__}; quant.Recipe({{...}}) makes one"
        )
    clashing = [name for name, module in model.named_modules() if has_attribute(module, RESERVED)]
    if clashing:
        raise ValueError(
            f"{verb}: {', '.join(name or '(root)' for name in clashing)} has an attribute '{RESERVED}', the one "
            "name that prepare needs for itself; rename it"
        )
    _check_rules(model, recipe)
    prepared = copy_model(model, training=training)
    halves = halves_of(prepared)
    if widen(prepared, [as_arguments(one) for one in (example_inputs, *examples)]):
        example_inputs = widened(example_inputs)
    captured = capture(prepared, example_inputs, training=training, islands=islands)
    _restore_parameters(prepared, model, captured.state)
    modules = dict(prepared.named_modules())
    floats = {path: unlike_in_training(captured.unlike_in_training, path) for path in captured.graphs}
    fused_graphs = {
        path: fuse(graph, modules[path], recipe, floats[path], rules) for path, graph in captured.graphs.items()
    }
    for path, reasons in one_range_each(fused_graphs, modules).items():
        fused_graphs[path] = fuse(captured.graphs[path], modules[path], recipe, {**floats[path], **reasons}, rules)
    note_shared(fused_graphs, modules)
    state: forward_state.State = {}
    kept = forward_state.kept_by_islands(prepared, "", captured.islands)
    forward_state.note(state, prepared, "", {*captured.state, *kept})
    extender = Extender(recipe, captured.islands, captured.called, state, training, make, halves, rules=rules)
    for path, fused in fused_graphs.items():
        extender.install(modules[path], fused)
    LaterCalls(prepared, extender).watch()
    _add_examples(prepared, examples, state)
    if training:  # a layer that begins in the middle of it would have no range, and a shallow copy would train another
        stop_waiting(prepared)
    example = encode(example_inputs)
    # Training changes buffers for good; calibration only passes through them.
    info = Prepared(recipe, captured.islands, captured.called, example, {} if training else state, halves)
    _refuse_nothing(prepared, info, verb, training=training)
    if captured.unlike_in_training:
        _say_unlike(prepared, verb)
    leave_record(prepared, info)
    return prepared


@torch.no_grad()
def _restore_parameters(prepared: nn.Module, model: nn.Module, changed: set[str]) -> None:
    """Give the parameters of a captured copy that its own forward changed the user's values again."""
    values = dict(model.named_parameters())
    for name, parameter in prepared.named_parameters():
        if name in changed and name in values and values[name].shape == parameter.shape:
            parameter.copy_(values[name])


def _full_name(graph: Graph, step: Step) -> str:
    node = graph.nodes[step.nodes[0]]
    return full_name(graph.path, node.target if node.kind is Kind.MODULE else step.name)


def _say_unlike(prepared: nn.Module, verb: str) -> None:
    for reason in REASONS:
        left = sorted(
            _full_name(one.graph, step)
            for one in runners(prepared).values()
            for step in one.fused.steps
            if step.reason == reason
        )
        if left:
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            warnings.warn(
                f"{verb}: {', '.join(left[:8])}{more}: the forward around does something else in training or with "
                f"gradients; {reason}, so these layers stay float. A forward that gives them the same values in both "
                "modes lets them be int8",
                CalibrationWarning,
                stacklevel=4,
            )


def _add_examples(prepared: nn.Module, examples: Sequence[Any], state: forward_state.State) -> None:
    """Call a prepared model in further ways, so that each has a program; what it writes on itself is put back."""
    for example in examples:
        args, kwargs = copied(as_arguments(example))
        with torch.no_grad(), replaying(), evaluating(prepared):
            prepared(*args, **kwargs)
    if examples:
        forward_state.put_back(state, prepared)
        for program in all_runners(prepared).values():  # those that the examples added began in eval mode
            program.train(program.root.training)


def make_runner(module: nn.Module, fused: FusedGraph) -> GraphRunner:
    """The observers of a fused graph; by channel too where a weight only fits inputs of many decades."""
    observers = {slot.name: slot_observer(slot) for slot in fused.slots.values()}
    of_inputs = set() if fused.graph.path else _before_layers(fused)
    for name, observer in observers.items():
        observer.name = full_name(fused.graph.path, name)
        observer.of_input = not of_inputs.isdisjoint(fused.slots[name].observed)
    runner = GraphRunner(module, fused, observers)
    for step, observer in suspects(runner):
        observer.name = full_name(fused.graph.path, f"{step.name} (input by channel)")
        runner.watch_columns(step.inputs[0], observer)
    return runner


def _before_layers(fused: FusedGraph) -> set[int]:
    """The inputs, and what is computed from them without a layer: inputs that the model itself scales."""
    layers = {node for step in fused.steps if isinstance(step.operator, (Weighted, Recurrent)) for node in step.nodes}
    before, behind = set[int](), set[int]()
    for node in fused.graph.nodes:
        if node.index in layers or not behind.isdisjoint(node.refs):
            behind.add(node.index)
        elif node.kind is Kind.INPUT or not before.isdisjoint(node.refs):
            before.add(node.index)
    return before


def slot_observer(slot: Slot) -> Observer:
    """The observer that a slot's QConfig asks for."""
    kind = slot.qconfig.activation_observer
    usual = "minmax" if slot.two_bytes else "histogram"  # 16 bits have room for all that comes
    return make_observer(
        usual if kind in (AUTO, PER_CALL) else kind, scheme_of(slot), **slot.qconfig.activation_options
    )


def scheme_of(slot: Slot) -> QScheme:
    """The integers that a slot's values become."""
    return SYMMETRIC_U8 if slot.qconfig.activation_symmetric else ACTIVATION_U8


def _refuse_nothing(prepared: nn.Module, info: Prepared, verb: str, *, training: bool) -> None:
    """Raise NothingQuantized where no step of no graph computes in integers, and no layer becomes dynamic.

    Programs of the int8 modules that are there are made by a recipe that asks for nothing else.
    """
    units = runners(prepared)
    is_int8 = not training and any(isinstance(module, QuantModule) for module in prepared.modules())
    if is_int8 and units and not asks_for_something(info.recipe):
        return
    if any(step.integer for runner in units.values() for step in runner.fused.steps):
        return
    if units and (any(map(is_dynamic, prepared.modules())) or dynamic_settings(prepared, info)):
        return
    reasons = [f"{name or '(root)'}: {reason}" for name, reason in info.islands.items()]
    for path, runner in units.items():
        for step in runner.fused.steps:
            if step.reason:
                reasons.append(f"{full_name(path, step.name)}: {step.reason}")
    if is_int8 and asks_for_something(info.recipe):
        reasons.insert(0, "it has int8 modules, of which recipe=quant.Recipe(default=None) makes programs")
    raise NothingQuantized(f"{verb}: no layer can be quantised; " + "; ".join(reasons[:20]))
