"""Checks that a phase can use all settings of a recipe; errors name the rule and the first layer concerned.

`check_observers` checks the recipe alone, before capture; `check_settings` checks it against the outcome for each
layer. A rule may match static and dynamic layers, so a setting is refused only where no layer of its rule can use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from quant.dynamic_decisions import base_type
from quant.fusion.fused_graph import FusedGraph
from quant.graph import Kind
from quant.leaves import is_dynamic
from quant.nn.registry import supported
from quant.observers import AUTO, LEARNED, OBSERVERS, PER_CALL, trains
from quant.ops.operator import Recurrent
from quant.ops.registered import Registered
from quant.recipe import DYNAMIC_SETTINGS, NO_RULE, STATIC_SETTINGS, QConfig, Recipe, RecipeError
from quant.runtime.names import attribute, full_name
from quant.static.dynamic_fallback import without_runner
from quant.static.runner import runners


def check_observers(recipe: Recipe, verb: str, *, training: bool) -> None:
    """Raise RecipeError for a rule, or a default, whose observers the phase does not have.

    Args:
        verb: how errors call what the user called.
        training: whether ranges follow batches in training, or are chosen once from all of them.
    """
    for rule, qconfig in _configs(recipe):
        asks = f"{verb}: {recipe.rule_text(rule)} asks for"
        if training and qconfig.per_call:
            raise RecipeError(
                f"{asks} activation_observer {PER_CALL!r}, and linear layers are trained with static ranges; leave it "
                "out here"
            )
        kind = qconfig.activation_observer
        if training and kind != AUTO and not trains(kind):
            legal = ", ".join([AUTO, *filter(trains, [*OBSERVERS, *LEARNED])])
            raise RecipeError(
                f"{asks} activation_observer {kind!r}, which searches all that it ever saw for a range, and training "
                f"moves on; expected one of {legal}. To begin with ranges of {kind!r}, calibrate first: quant.prepare "
                "with this recipe, quant.calibrate.run, then quant.prepare_qat(prepared)"
            )
        for setting in () if training else ("activation_observer", "weight_observer"):
            if getattr(qconfig, setting) in LEARNED:
                raise RecipeError(
                    f"{asks} {setting} {getattr(qconfig, setting)!r}, which is learned in training "
                    f"(quant.prepare_qat); calibration takes {', '.join(OBSERVERS)}"
                )


def check_settings(prepared: nn.Module, recipe: Recipe, called: set[str], verb: str) -> None:
    """Raise RecipeError for a setting that no layer of its rule can use, or a range by hand that has no place.

    Args:
        prepared: with a runner in each captured module.
        called: dotted names of the modules that ran on the example inputs.
        verb: as for `check_observers`.
    """
    decided = _decided(prepared, recipe, called)
    for rule, qconfig in _configs(recipe):
        layers, asks = decided.get(rule, _Layers()), f"{verb}: {recipe.rule_text(rule)} asks for"
        for setting in qconfig.changed():
            value = getattr(qconfig, setting)
            if setting in DYNAMIC_SETTINGS and layers.static and not layers.dynamic:
                raise RecipeError(
                    f"{asks} {setting}={value!r}, and layer {layers.static[0]!r} {DYNAMIC_SETTINGS[setting]}; leave "
                    f"{setting} out, or use quant.quantize_dynamic"
                )
            if setting in STATIC_SETTINGS and value != PER_CALL and layers.dynamic and not layers.static:
                raise RecipeError(
                    f"{asks} {setting}={value!r}, and layer {layers.dynamic[0]!r} becomes dynamic, without it; leave "
                    "it out for this layer"
                )
        if qconfig.per_call and not layers.dynamic:
            raise RecipeError(
                f"{asks} activation_observer={PER_CALL!r}, and it decides no layer that has a dynamic form; these are "
                f"{', '.join(one.__name__ for one in supported())}"
            )
        if qconfig.by_hand and not layers.with_range:
            why = "it decides no layer with weights"
            if layers.static:
                why = f"the output of layer {layers.static[0]!r} is read in float"
            raise RecipeError(
                f"{asks} a range by hand, and {why}: only what a weighted layer puts out for an integer one has a "
                "range by a rule. quant.calibrate.set_ranges(prepared, {name: (low, high)}) sets any other, by the "
                "names that quant.calibrate.ranges(prepared) lists"
            )
    for path, runner in runners(prepared).items():
        _check_shared(runner.fused, path, verb)
        _check_recurrent(runner.fused, path, verb)


@dataclass
class _Layers:
    """The layers that one rule decides, by full name; `with_range`: the static ones with an integer output."""

    static: list[str] = field(default_factory=list)
    dynamic: list[str] = field(default_factory=list)
    with_range: list[str] = field(default_factory=list)


def asks_for_something(recipe: Recipe) -> bool:
    """Whether a recipe has settings for any layer; one of None alone leaves all as they are."""
    return any(True for _ in _configs(recipe))


def _configs(recipe: Recipe) -> Iterator[tuple[int, QConfig]]:
    """Every QConfig of a recipe, by its rule's index."""
    for index, rule in enumerate(recipe.rules):
        if rule.qconfig is not None:
            yield index, rule.qconfig
    if recipe.default is not None:
        yield NO_RULE, recipe.default


def _decided(prepared: nn.Module, recipe: Recipe, called: set[str]) -> dict[int, _Layers]:
    decided: dict[int, _Layers] = {}
    static: set[str] = set()
    for path, runner in runners(prepared).items():
        fused = runner.fused
        for step in fused.steps:
            if not step.integer or step.qconfig is None:
                continue
            node = fused.graph.nodes[step.nodes[0]]
            inner = node.target if node.kind is Kind.MODULE else node.owner
            name, module = full_name(path, inner), attribute(runner.root, inner)
            layers = decided.setdefault(recipe.resolve(name, module)[1], _Layers())
            static.add(name)
            layers.static.append(name)
            if fused.emits_integers(step) or inner in {layer for layer, _ in fused.inner}:
                layers.with_range.append(name)
    for name, module in prepared.named_modules():
        if name not in called or name in static:
            continue
        qconfig, rule = recipe.resolve(name, module)
        asked = qconfig is not None and qconfig.per_call and base_type(without_runner(module)) is not None
        if asked or is_dynamic(module):
            decided.setdefault(rule, _Layers()).dynamic.append(name)
    return decided


def _check_shared(fused: FusedGraph, path: str, verb: str) -> None:
    """Check that a range set by hand is the same for all layers whose outputs have it."""
    makers = {step.output: step for step in fused.steps}
    for slot in fused.slots.values():
        writers = [makers[value] for value in slot.observed]
        ranges = {_by_hand(step.qconfig) for step in writers}
        if len(ranges) > 1:
            names = ", ".join(repr(full_name(path, step.name)) for step in writers)
            raise RecipeError(
                f"{verb}: {names} share one range, and the recipe gives it by hand to some of them, or another to "
                f"each; leave it out and set the one range by its name, quant.calibrate.set_ranges(prepared, "
                f"{{{full_name(path, slot.name)!r}: (low, high)}})"
            )


def _check_recurrent(fused: FusedGraph, path: str, verb: str) -> None:
    """Refuse learned scales for weights of recurrent and registered layers."""
    for step in fused.steps:
        if not isinstance(step.operator, (Recurrent, Registered)):
            continue
        if step.qconfig is not None and step.qconfig.weight_observer in LEARNED:
            raise RecipeError(
                f"{verb}: layer {full_name(path, step.name)!r}: weight_observer is {step.qconfig.weight_observer!r}, "
                "and scales of recurrent and registered layers are not learned; give it one that follows the weight "
                "('minmax')"
            )


def _by_hand(qconfig: QConfig | None) -> Any:
    return qconfig.activation_options if qconfig is not None and qconfig.by_hand else None
