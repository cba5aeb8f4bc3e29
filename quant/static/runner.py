"""Runs a captured module's graph in float: with its observers, or rounded as its int8 form will be.

A prepared module has its runner as one more child, `RESERVED`, and the runner's `run` in place of its forward.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quant.devices import device_of, relocate
from quant.fusion.fused_graph import FusedGraph
from quant.graph import Graph, Kind, Span, evaluate, expected_call
from quant.kernels import QParams, two_bytes
from quant.observers import NoDataSeen
from quant.observers.fake_quantize import fake_quantize
from quant.ops.step import Step, is_recurrent
from quant.runtime import nonfinite
from quant.runtime.arguments import bind
from quant.runtime.as_forward import as_forward
from quant.runtime.binding import bound_values
from quant.runtime.keys import ProgramKey
from quant.runtime.layers.weighted import QWeight
from quant.runtime.matching import CaptureMismatch, match_arguments
from quant.runtime.names import attribute
from quant.runtime.outputs import finished
from quant.runtime.own_forward import run_own_forward, without_runner
from quant.runtime.programs import RESERVED, Programs, runner_in
from quant.runtime.trees import Ref, map_leaves, settle
from quant.runtime.uncaptured import warn_once
from quant.runtime.write_rollback import undone_at_mismatch
from quant.static import weights
from quant.static.observation import Observation
from quant.static.prepared import is_prepared
from quant.static.ranges import Ranges
from quant.static.step_simulation import RoundedLayer, rounded_layer, simulated, simulated_recurrent


class Extend(Protocol):
    """Adds a program for a call to those of a module, and says whether it is new; None where the call can have none.

    Where `GraphRunner.others` are more than the call was `tried` with, another thread has added the first behind those.

    Attributes:
        refused: by module, why calls of it have no program.
    """

    refused: dict[str, list[str]]

    def __call__(
        self, first: GraphRunner, tried: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GraphRunner | None, bool]: ...


class GraphRunner(Ranges, Programs):
    """Runs a captured module's graph in float and shows its values to observers.

    Attributes:
        expected: the calls that the graph stands for.
        alone: whether a call of the module by itself brought this, and not the example inputs.
        promoted: whether this took the place of the module's first program, to which no data came.
        extend: makes one more program for a call; None where no call is to have one.
        simulate: compute what the integers will, instead of observing (`simulation.py`).
        adds_exactly: in a simulation, add products as the integers do and not in float32 (`simulate.exactly`).
        dropped: in a simulation, whether convert would drop this program, which saw no data.
        tables: look-up tables for convert to use instead of computing them, by step; of a loaded model.
        int8_weights: weights for convert to use instead of rounding the float ones, by step; of a model that another
            toolkit quantised.
        learned_weights: those whose rounding was learned (`quant/reconstruction/`), by step.
        on_call: is given the values with which each call begins; None where nobody asks.
    """

    def __init__(self, root: nn.Module, fused: FusedGraph, observers: Mapping[str, nn.Module]) -> None:
        super().__init__(root, fused, observers)
        self.extend: Extend | None = None
        self.example: Any = None
        self.alone = self.promoted = False
        self.simulate = self.adds_exactly = self.dropped = False
        self.tables: dict[str, Tensor] = {}
        self.int8_weights: dict[str, QWeight] = {}
        self.learned_weights: dict[str, QWeight] = {}
        self.on_call: Callable[[dict[int, Any]], None] | None = None
        self._device = device_of(root)
        self.expected = expected_call(fused.graph, fused.slot_of, ranked=fused.ranked)
        self._observation: Observation | None = None
        self._unknown: tuple[str, int] | None = None
        self.register_load_state_dict_post_hook(_forgive_missing_observers)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_explain_unknown_programs)  # type: ignore[no-untyped-call]

    def use(self, fused: FusedGraph, observers: Mapping[str, nn.Module]) -> None:
        """Run another fusion of the same graph, with an observer for each of its slots."""
        super().use(fused, observers)
        self.expected = expected_call(fused.graph, fused.slot_of, ranked=fused.ranked)
        self._observation = None

    def watch_columns(self, value: int, observer: nn.Module) -> None:
        super().watch_columns(value, observer)
        self._observation = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GraphRunner:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._device is not None:
            device = fn(torch.empty(0, device=self._device)).device
            if device != self._device:
                relocate(self.graph, self._device, device)
                fused = self.fused
                self._device, self.expected = device, expected_call(self.graph, fused.slot_of, ranked=fused.ranked)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        others = f"{prefix}others."
        places = {key.removeprefix(others).partition(".")[0] for key in state_dict if key.startswith(others)}
        self._unknown = (prefix, len(places)) if len(places) > len(self.others) else None
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def run_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.dropped:
            raise CaptureMismatch(f"{type(self.root).__name__}: calibration had no call of this kind")
        values = bound_values(self.expected, self.root, args, kwargs)
        if self.on_call is not None:
            self.on_call(dict(values))
        if self.expected.written:
            output = undone_at_mismatch(self.expected.written, self.root, dict(values), lambda: self._computed(values))
        else:
            output = self._computed(values)
        return finished(output, self.root, args, kwargs)

    def _computed(self, values: dict[int, Any]) -> Any:
        if is_replaying():
            return self._replay(values)
        if not self.simulate:
            return self._observe(values)
        with self.settled():
            return self._simulate(values)

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Show a call's values to the observers, and write nothing; a call without this program is none of its."""
        with contextlib.suppress(CaptureMismatch), torch.no_grad():
            self._observe(bound_values(self.expected, self.root, args, kwargs))

    def run_unlike(self, mismatch: CaptureMismatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call without a program: by a new program, or by the user's own forward."""
        refused = [] if self.extend is None else self.extend.refused.setdefault(self.graph.path, [])
        tried = len(self.others)
        while self.extend is not None and not self.simulate and tried + len(refused) < MOST_PROGRAMS - 1:
            added, is_new = self.extend(self, tried, args, kwargs)
            if added is None:
                break
            try:
                return added.run_program(args, kwargs)
            except CaptureMismatch:
                if is_new:
                    raise
                tried += 1
        with without_runner(self):
            output = run_own_forward(self.root, self.own_forward, args, kwargs, mismatch)
        why = refused[-1] if refused else ""
        warn_once(self.warned, self.graph.path, self.root, mismatch, "in float, unobserved", why)
        return output

    def follow(self, first: GraphRunner) -> None:
        """Share the switches of the module's first program, and its observers of weights."""

    def known_of_weight(self, step: Step) -> dict[str, Any]:
        """What `weights.quantized` is told of a weighted step, by its arguments' names, and the weight where it is
        `given`."""
        given = self.learned_weights.get(step.name)
        return {"learned": self.learned(step), "mean": self.mean(step), "given": given}

    def has_seen(self) -> bool:
        """Whether all of its observers saw data."""
        try:
            return all(self.qparams(name) is not None for name in self.fused.slots)
        except NoDataSeen:
            return False

    def _replay(self, values: dict[int, Any]) -> Any:
        """Run the graph in float, without observers."""
        for node in self.graph.nodes:
            if node.kind is not Kind.INPUT:
                values[node.index] = evaluate(node, self.root, values.__getitem__)
        return output_of(self.graph, values)

    def _observe(self, values: dict[int, Any]) -> Any:
        if self._observation is None:
            self._observation = Observation(self)
        self._observation.run(values)
        return output_of(self.graph, values)

    def rounded_layer(self, step: Step) -> RoundedLayer:
        """The weight and the bias of a weighted step as its integers stand for them."""
        known, (scale, smallest) = self.known_of_weight(step), self.input_scales(step)  # type: ignore[misc]
        given: QWeight | None = known.pop("given")
        return rounded_layer(step, given or weights.quantized(step, self.graph, self.root, smallest, **known), scale)

    def simulated(
        self,
        step: Step,
        value: Callable[[int], Any],
        state: Callable[[int], Any] | None = None,
        *,
        layer: RoundedLayer | None = None,
    ) -> dict[int, Any]:
        """A step's simulated values before rounding to their range, by node.

        Args:
            value: as in `step_simulation.simulated`.
            state: the same for the state of a recurrent step, which is not rounded; `value` where None.
            layer: of a weighted step, where it is known already (`rounded_layer`).
        """
        if not is_recurrent(step):
            value = self.split_finely(step, value)
            if layer is not None:
                return {step.output: simulated(step, self.graph, self.root, value, layer=layer)}
            known = self.known_of_weight(step)
            if self.adds_exactly and not step.reads_two_bytes:
                emits = self.fused.emits_integers(step)
                known |= {"exact": True, "output": self.qparams(self.fused.slot_of[step.output]) if emits else None}
            return {step.output: simulated(step, self.graph, self.root, value, *self.input_scales(step), **known)}
        inner = {name: rounding(self.qparams(slot)) for name, slot in self.fused.inner_slots(step).items()}
        result = simulated_recurrent(step, self.graph, self.root, value, state or value, inner)
        return {node: result if place == 0 else result[0] for place, node in enumerate(step.nodes)}

    def split_finely(self, step: Step, value: Callable[[int], Any]) -> Callable[[int], Any]:
        """The values that a step reads, as `value` gives them; a layer with 16-bit activations rounds its input."""
        if not step.reads_two_bytes:
            return value
        qparams = self.qparams(self.fused.slot_of[step.inputs[0]])
        return lambda index: two_bytes.rounded(value(index), qparams.scale, qparams.zero_point)

    def simulated_part(self, part: nn.Module, span: Span, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Simulate a direct call of a part that the graph sees through: its span, with float inputs and output.

        Raises:
            CaptureMismatch: the part was not called so when it was captured.
        """
        values: dict[int, Any] = {}
        bound = bind(part, args, kwargs)
        for name, expected in span.arguments.items():
            match_arguments(expected, bound[name], f"{span.path}: argument '{name}'", values.__setitem__)
        inside = range(span.start, span.end)
        steps = [step for step in self.fused.steps if all(index in inside for index in step.nodes)]
        # Integer steps round the inputs; float ones read them as they are.
        rounded = {value: map_leaves(rounding(self.qparams(self.fused.slot_of[value])), real)
                   for value, real in values.items() if value in self.fused.slot_of}  # fmt: skip
        self.simulate_steps(steps, values, rounded)
        output = map_leaves(lambda leaf: values[leaf.index] if isinstance(leaf, Ref) else leaf, span.output)
        return settle(nonfinite.spoiled(output, values), bound)

    def _simulate(self, values: dict[int, Any]) -> Any:
        self.simulate_steps(self.fused.steps, values, {})
        return nonfinite.spoiled(output_of(self.graph, values), values)

    def simulate_steps(self, steps: list[Step], values: dict[int, Any], rounded: dict[int, Any]) -> None:
        """Add the simulated values of steps to `values`; to `rounded` those of `FusedGraph.read_both_ways`, rounded."""
        both = self.fused.read_both_ways()
        for step in steps:
            slot = self.fused.slot_of.get(step.output)
            if self.graph.nodes[step.output].kind is not Kind.INPUT:
                values.update(self.simulated(step, seen_by(step, values, rounded).__getitem__, values.__getitem__))
            if slot is not None:
                self.note_nonfinite(step, values)
                kept = rounded if step.output in both else values
                kept[step.output] = map_leaves(rounding(self.qparams(slot)), values[step.output])

    def note_nonfinite(self, step: Step, values: dict[int, Any]) -> None:
        """Note which samples of a step's output are not finite, where the int8 form makes integers of reals."""
        if is_recurrent(step):
            module = attribute(self.root, self.graph.nodes[step.nodes[0]].target)
            nonfinite.note_recurrent(module, values.get(step.inputs[0]), None, values)
        elif not step.integer:
            nonfinite.note(values[step.output], values)


def seen_by(step: Step, values: dict[int, Any], rounded: dict[int, Any]) -> dict[int, Any]:
    """The values that a step reads; an integer step reads those of `FusedGraph.read_both_ways` rounded, one with 16-bit
    activations as they are."""
    rounds = step.integer and not step.reads_two_bytes
    own = {value: rounded[value] for value in step.inputs if rounds and value in rounded}
    return {**values, **own} if own else values


def rounding(qparams: QParams) -> Callable[[Tensor], Tensor]:
    """A function that rounds a value as quantising and dequantising it does, in one pass where it is float32."""

    def rounded(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return qparams.dequantize(qparams.quantize(x))
        return fake_quantize(x.detach(), qparams.scale, qparams.zero_point, qparams.scheme)

    return rounded


MOST_PROGRAMS = 8
"""The largest number of programs of one module, as compilers limit recompilations; further calls run as they are."""

_replaying: contextvars.ContextVar[bool] = contextvars.ContextVar("octet_replaying", default=False)


def is_replaying() -> bool:
    """Whether prepared modules compute in float and observe nothing."""
    return not torch.compiler.is_compiling() and _replaying.get()


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """Let prepared modules run their graphs in float and observe nothing."""
    token = _replaying.set(True)
    try:
        yield
    finally:
        _replaying.reset(token)


def all_runners(model: nn.Module) -> dict[ProgramKey, GraphRunner]:
    """As `runners`, with further programs."""
    return {
        ProgramKey(name, place): one
        for name, runner in runners(model).items()
        for place, one in enumerate(runner.programs(), 1)
    }


def first_programs(model: nn.Module) -> dict[int, GraphRunner]:
    """The first program of the same module, for each of `all_runners` by its id."""
    return {id(one): runner for runner in runners(model).values() for one in runner.programs()}


def keep_programs(first: GraphRunner, kept: list[GraphRunner]) -> None:
    """Let a module have these programs, in this order, and no others."""
    taking, *others = kept
    taking.others = nn.ModuleList(others)
    taking.promoted = taking is not first
    if taking.promoted:
        taking.own_forward, taking.extend = first.own_forward, first.extend
        first.root._modules[RESERVED] = taking
        first.root.__dict__["forward"] = as_forward(taking.run, first.root, taking.own_forward)


def remove_programs(first: GraphRunner) -> None:
    """Let a module run the user's own forward again."""
    del first.root._modules[RESERVED], first.root.__dict__["forward"]
    if first.own_forward is not None:
        first.root.__dict__["forward"] = first.own_forward


def runners(model: nn.Module) -> dict[str, GraphRunner]:
    """The runners of a prepared model by the dotted name of the module that each runs."""
    by_name = {}
    for name, module in model.named_modules():
        runner = runner_in(module)
        if isinstance(runner, GraphRunner):
            by_name[name] = runner
    return by_name


def output_of(graph: Graph, values: dict[int, Any]) -> Any:
    """The captured module's output from its nodes' values, before it is `finished`."""
    return map_leaves(lambda leaf: values[leaf.index] if isinstance(leaf, Ref) else leaf, graph.output)


def _forgive_missing_observers(runner: nn.Module, incompatible: Any) -> None:
    """Let a float checkpoint load, although it has no observers."""
    keys = set(runner.state_dict())
    missing = [key for key in incompatible.missing_keys if RESERVED in key.split(".")]
    if len(missing) >= len(keys):
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in missing]


def _explain_unknown_programs(runner: nn.Module, incompatible: Any) -> None:
    """In place of the keys of programs that a state has and this model has not, say how it gets them."""
    assert isinstance(runner, GraphRunner)
    if runner._unknown is None:
        return
    prefix, count = runner._unknown
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key for key in keys if not key.startswith(prefix)]
    incompatible.unexpected_keys.append(
        f"{prefix}others: the state is of a model that met {count} further kinds of call of "
        f"'{runner.graph.path or type(runner.root).__name__}', and this one has met {len(runner.others)}; before "
        "loading, give inputs of such calls as examples=[...] where the model is prepared, or call it once in each "
        "way, in the order in which they came (one from prepare_qat, in training mode)"
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The prepared model inside a wrapper that averages or distributes it; other models as they are."""
    while not is_prepared(model) and isinstance(model, _wrappers()):
        inner = model.module
        assert isinstance(inner, nn.Module)
        model = inner
    return model


def _wrappers() -> tuple[type[nn.Module], ...]:
    from torch.optim.swa_utils import AveragedModel

    return (AveragedModel, nn.DataParallel, nn.parallel.DistributedDataParallel)
