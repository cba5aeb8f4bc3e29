"""Prepare: a copy of the user's model that watches its own activations, ready to be calibrated by just running it.

The copy has the user's classes, names and parameters; a captured module runs its graph instead of its forward, and
one more child, `RESERVED`, holds the observers. `simulating` lets the same model compute what its int8 form will.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.capture import capture
from quant.dynamic import NothingQuantized
from quant.fuse import Plan, Slot, Step, is_recurrent, make_plan
from quant.graph import (
    CaptureMismatch,
    Graph,
    Node,
    Ref,
    arguments_of,
    attribute,
    evaluate,
    map_leaves,
    match_arguments,
)
from quant.kernels import ACTIVATION_U8, QParams, QScheme
from quant.names import full_name
from quant.observers import FixedObserver, Observer, make_observer
from quant.recipe import Recipe, RecipeError
from quant.shared import note_shared, one_range_each
from quant.static.arguments import bind
from quant.static.dead import last_uses
from quant.static.examples import encode
from quant.static.leaves import is_dynamic
from quant.static.ranges import Ranges, key_of
from quant.static.recurrent import observe
from quant.static.simulate import simulated, simulated_recurrent

RESERVED = "_quant"
"""Name of the child that a captured module gets; the only name that prepare adds to a model."""

SYMMETRIC_U8 = QScheme(torch.uint8, 0, 255, symmetric=True)


@dataclass
class Prepared:
    """What prepare notes on the model it returns.

    Attributes:
        recipe: as given.
        islands: why modules are no part of a graph, by dotted name.
        called: dotted names of the modules that ran on the example inputs.
        example: shapes and dtypes of the example inputs, as JSON; None where they have no such form.
    """

    recipe: Recipe
    islands: dict[str, str]
    called: set[str]
    example: Any


class GraphRunner(Ranges):
    """Runs a captured module's graph in float and shows its values to observers.

    Attributes:
        simulate: compute what the integers will, instead of observing.
        tables: look-up tables that convert is to take instead of computing them, by step; of a model that is loaded.
    """

    def __init__(self, root: nn.Module, plan: Plan, points: Mapping[str, nn.Module]) -> None:
        super().__init__(root, plan, points)
        self.simulate = False
        self.tables: dict[str, Tensor] = {}
        self._last = last_uses(plan.graph)
        self._recurrent = {step.nodes[0]: step for step in plan.steps if is_recurrent(step)}
        self.register_load_state_dict_post_hook(_forgive_missing_points)  # type: ignore[no-untyped-call]

    def replan(self, plan: Plan, points: Mapping[str, nn.Module]) -> None:
        """Run another plan of the same graph, with an observer for each of its slots."""
        super().replan(plan, points)
        self._recurrent = {step.nodes[0]: step for step in plan.steps if is_recurrent(step)}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The captured module's forward."""
        values = bound_values(self.graph, self.root, args, kwargs)
        return self._simulate(values) if self.simulate else self._observe(values)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `run`; a runner is called through the module it belongs to."""
        return self.run(*args, **kwargs)

    def _observe(self, values: dict[int, Any]) -> Any:
        observed = {value: slot.name for slot in self.plan.slots.values() for value in slot.observed}
        means: dict[int, list[nn.Module]] = {}
        for step in self.corrected():
            if key_of(step.name) in self.means:  # a plan that came later may have fewer calls of a layer
                means.setdefault(step.inputs[0], []).append(self.means[key_of(step.name)])
        for node in self.graph.nodes:
            if node.kind != "input":
                values[node.index] = evaluate(node, self.root, values.__getitem__)
            if node.index in self._recurrent:
                self._observe_states(node, values)
            if node.index in observed:
                values[node.index] = self.point(observed[node.index])(values[node.index])
            for mean in means.get(node.index, ()):
                mean(values[node.index])
            if node.index in self._columns:
                self.points[self._columns[node.index]](values[node.index])
            for dead in self._last.get(node.index, ()):
                del values[dead]
        return output_of(self.graph, values)

    def _observe_states(self, node: Node, values: dict[int, Any]) -> None:
        slots = self.plan.inner_slots(self._recurrent[node.index])
        args, kwargs = arguments_of(node, self.root, values.__getitem__)
        module = attribute(self.root, node.target)
        with torch.no_grad():
            observe(module, args, kwargs, values[node.index], lambda name, x: self.point(slots[name])(x))

    def simulated(self, step: Step, value: Callable[[int], Any]) -> dict[int, Any]:
        """What a step computes, before it is rounded to its own range, by node; `value` as in `simulate.simulated`."""
        if not is_recurrent(step):
            scales, known = self.input_scales(step), {"learned": self.learned(step), "mean": self.mean(step)}
            return {step.output: simulated(step, self.graph, self.root, value, *scales, **known)}
        inner = {name: rounding(self.qparams(slot)) for name, slot in self.plan.inner_slots(step).items()}
        found = simulated_recurrent(step, self.graph, self.root, value, inner)
        return {node: found if place == 0 else found[0] for place, node in enumerate(step.nodes)}

    def _simulate(self, values: dict[int, Any], watch: Callable[[int, Any], None] | None = None) -> Any:
        for step in self.plan.steps:
            slot = self.plan.slot_of.get(step.output)
            if self.graph.nodes[step.output].kind != "input":
                values.update(self.simulated(step, values.__getitem__))
            if slot is not None:
                values[step.output] = map_leaves(rounding(self.qparams(slot)), values[step.output])
            if watch is not None:
                watch(step.output, values[step.output])
        return output_of(self.graph, values)


def rounding(qparams: QParams) -> Callable[[Tensor], Tensor]:
    """What a value becomes that goes through integers."""
    return lambda x: qparams.dequantize(qparams.quantize(x))


def prepare(model: nn.Module, example_inputs: Any, recipe: Recipe | None = None) -> nn.Module:
    """A copy of `model` with observers, to be calibrated by calling it and then converted.

    Args:
        model: any module, unedited; left as it is.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments. They decide which
            branches on sizes are taken; batch size and image size stay free where the model leaves them free.
        recipe: which layers are quantised and how; None quantises everything that has an int8 kernel.

    Raises:
        TypeError: `model` is not a module.
        RecipeError: a rule matches no module.
        NothingQuantized: no layer of the model can be, or may be, quantised; with the reasons.
    """
    return planned(model, example_inputs, recipe or Recipe(), _install_watching, "quant.prepare")


def planned(
    model: nn.Module,
    example_inputs: Any,
    recipe: Recipe,
    install: Callable[[nn.Module, Plan], None],
    verb: str,
) -> nn.Module:
    """A copy of `model` whose captured modules run their graphs; as `prepare`, for calibration or for training.

    Args:
        install: puts a runner of the plan into a captured module.
        verb: how errors call what the user called.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{verb}: expected an nn.Module, got {type(model).__name__}")
    if runners(model):
        raise ValueError(f"{verb}: the model is prepared already; prepare the float model it came from")
    taken = [name for name, module in model.named_modules() if hasattr(module, RESERVED)]
    if taken:
        raise ValueError(
            f"{verb}: {', '.join(name or '(root)' for name in taken)} has an attribute '{RESERVED}', the one "
            "name that prepare needs for itself; rename it"
        )
    unmatched = recipe.unmatched(model.named_modules(remove_duplicate=False))
    if unmatched:
        raise RecipeError(
            f"recipe: no module matches {'; '.join(map(str, unmatched))}; the model has "
            f"{[name for name, _ in model.named_modules() if name][:20]}"
        )
    prepared = copy.deepcopy(model)
    found = capture(prepared, example_inputs)
    modules = dict(prepared.named_modules())
    plans = {path: make_plan(graph, modules[path], recipe) for path, graph in found.graphs.items()}
    for path, reasons in one_range_each(plans, modules).items():
        plans[path] = make_plan(found.graphs[path], modules[path], recipe, reasons)
    note_shared(plans, modules)
    for path, plan in plans.items():
        install(modules[path], plan)
    refuse_nothing(prepared, found.islands, verb)
    prepared.__dict__[RESERVED + "_prepared"] = Prepared(recipe, found.islands, found.called, encode(example_inputs))
    return prepared


def install(module: nn.Module, plan: Plan) -> None:
    """Let `module` run `plan`."""
    points = {slot.name: make_point(slot) for slot in plan.slots.values()}
    for name, point in points.items():
        point.name = full_name(plan.graph.path, name)
    runner = GraphRunner(module, plan, points)
    runner.train(module.training)
    module.add_module(RESERVED, runner)
    module.__dict__["forward"] = runner.run


def _install_watching(module: nn.Module, plan: Plan) -> None:
    install(module, plan)
    _watch_suspects(module)


def _watch_suspects(module: nn.Module) -> None:
    from quant.static.beyond import suspects  # which reads runners, and so needs this module

    runner = module._modules[RESERVED]
    assert isinstance(runner, GraphRunner)
    for step, observer in suspects(runner):
        observer.name = full_name(runner.graph.path, f"{step.name} (input by channel)")
        runner.watch_columns(step.inputs[0], observer)


def make_point(slot: Slot) -> Observer:
    """The observer that a slot's QConfig asks for, or a fixed one where the range is known beforehand."""
    scheme = scheme_of(slot)
    if slot.fixed is not None:
        return FixedObserver(scheme, low=slot.fixed[0], high=slot.fixed[1])
    return make_observer(slot.qconfig.activation_observer, scheme)


def scheme_of(slot: Slot) -> QScheme:
    """The integers that a slot's values become."""
    return SYMMETRIC_U8 if slot.qconfig.activation_symmetric else ACTIVATION_U8


def runners(model: nn.Module) -> dict[str, GraphRunner]:
    """The runners of a prepared model by the dotted name of the module that each runs."""
    found = {}
    for name, module in model.named_modules():
        runner = module._modules.get(RESERVED)
        if isinstance(runner, GraphRunner):
            found[name] = runner
    return found


def refuse_nothing(prepared: nn.Module, islands: dict[str, str], verb: str = "quant.prepare") -> None:
    """Raise NothingQuantized where no step of no graph computes in integers."""
    found = runners(prepared)
    if any(step.integer for runner in found.values() for step in runner.plan.steps):
        return
    if found and any(map(is_dynamic, prepared.modules())):
        return
    reasons = [f"{name or '(root)'}: {reason}" for name, reason in islands.items()]
    for path, runner in found.items():
        for step in runner.plan.steps:
            if step.reason:
                reasons.append(f"{full_name(path, step.name)}: {step.reason}")
    raise NothingQuantized(f"{verb}: no layer can be quantised; " + "; ".join(reasons[:20]))


@contextlib.contextmanager
def simulating(prepared: nn.Module) -> Iterator[nn.Module]:
    """Let a calibrated model compute what its int8 form will, in float: rounded activations, rounded weights."""
    found = list(runners(prepared).values())
    for runner in found:
        runner.simulate = True
    try:
        with torch.no_grad():
            yield prepared
    finally:
        for runner in found:
            runner.simulate = False


def bound_values(graph: Graph, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Any]:
    """The tensors of a call, by the nodes that stand for them.

    Raises:
        CaptureMismatch: the call is not of the kind that was captured.
    """
    values: dict[int, Any] = {}

    def take(index: int, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise CaptureMismatch(
                f"{type(root).__name__}: argument '{graph.nodes[index].target}' was a tensor in example_inputs and is "
                f"{value!r} now; prepare the model with example_inputs like this call"
            )
        values[index] = value

    bound = bind(root, args, kwargs)
    for name, expected in graph.arguments.items():
        match_arguments(expected, bound[name], f"{type(root).__name__}: argument '{name}'", take)
    return values


def output_of(graph: Graph, values: dict[int, Any]) -> Any:
    """The captured module's output from its nodes' values."""
    return map_leaves(lambda leaf: values[leaf.index] if isinstance(leaf, Ref) else leaf, graph.output)


def _forgive_missing_points(runner: nn.Module, incompatible: Any) -> None:
    """A float checkpoint knows no observers, and may be loaded all the same."""
    keys = set(runner.state_dict())
    missing = [key for key in incompatible.missing_keys if RESERVED in key.split(".")]
    if len(missing) >= len(keys):
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in missing]
