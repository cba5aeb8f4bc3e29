"""Further programs of a captured module, for calls whose structure differs from those captured before.

A mask or none, an empty or a filled cache, another branch on a size: each such call is captured when it first comes, up
to `MOST_PROGRAMS` for a module. Values computed at the same place share observers, so that a layer has the same ranges
in all programs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quant import forward_state
from quant.called_alone import layers_of, watch_parts
from quant.capture import Capture, capture_call
from quant.capture.snapshot import Snapshot, holding
from quant.capture.unlike_in_training import within
from quant.devices import device_of, tensors_on
from quant.fusion.fuse import fuse
from quant.fusion.fused_graph import RULES, FusedGraph, Slot
from quant.graph import Graph, Kind
from quant.kernels.at_fork import Turns
from quant.recipe import Recipe
from quant.runtime.arguments import Arguments, copied, copied_together, share_memory, tensors_in
from quant.runtime.as_forward import as_forward
from quant.runtime.names import full_name
from quant.runtime.own_forward import without_runner
from quant.runtime.programs import RESERVED, runner_in
from quant.runtime.trees import Attr, leaves
from quant.shared import add_shared
from quant.static.examples import encode
from quant.static.runner import GraphRunner, runners
from quant.unprepared import reach, unprepared
from quant.waiting_forwards import not_waiting, waiting
from quant.widening import refuse_another_way

MakeRunner = Callable[[nn.Module, FusedGraph], GraphRunner]
"""(captured module, its fused graph) -> the runner, for calibration or for training."""


@dataclass
class Extender:
    """Adds a program for a call to a captured module; the `extend` of a `GraphRunner`.

    Attributes:
        recipe, islands, called, training: those of the prepared model; new islands and calls are added.
        state: the state that forwards keep (`forward_state.py`), before any data; that of new programs is added.
        make: builds the runner.
        halves: name of a tensor -> its half type in the user's model.
        refused: module -> reasons that calls of it have no program. They count among `MOST_PROGRAMS`, since each was
            captured.
        rules: as for `fuse`.
    """

    recipe: Recipe
    islands: dict[str, str]
    called: set[str]
    state: forward_state.State
    training: bool
    make: MakeRunner
    halves: Mapping[str, torch.dtype] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)
    rules: int = RULES

    def __call__(
        self, first: GraphRunner, tried: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GraphRunner | None, bool]:
        """As `Extend`: None where the module is an island for this call."""
        root, path = first.root, first.graph.path
        if first.graph.writes and share_memory(tensors_in((args, kwargs))):
            return None, True  # a program's arguments do not share memory
        with _extending:
            if len(first.others) > tried:
                return first.programs()[1 + tried], False
            call, by_user = copied_together((args, kwargs)), not path or first.alone
            captured = self._captured(root, path, call, called_by_user=by_user)
            return self._added(first, captured, (args, kwargs)), True

    def _added(self, first: GraphRunner, captured: Capture, call: Arguments) -> GraphRunner | None:
        """The runner of a further program, where a call gave one."""
        root, path = first.root, first.graph.path
        self.called |= captured.called
        new = [name for name in captured.islands if name not in self.islands]
        forward_state.note(self.state, root, path, {*captured.state, *forward_state.kept_by_islands(root, path, new)})
        floats = {**first.fused.floats, **within(captured.unlike_in_training, path)}
        for name, graph in captured.graphs.items():
            module = root.get_submodule(name.removeprefix(path).removeprefix("."))
            if name != path and not isinstance(runner_in(module), GraphRunner):
                inside = within(captured.unlike_in_training, name)
                self.install(module, fuse(graph, module, self.recipe, inside, self.rules))
        self.islands.update({name: why for name, why in captured.islands.items() if name != path})
        if path not in captured.graphs:
            self.refused.setdefault(path, []).append(captured.islands.get(path, "it gives no graph"))
            return None
        fused = fuse(captured.graphs[path], root, self.recipe, floats, self.rules)
        fused.shared = first.fused.shared
        added = self.add(first, fused)
        added.example = encode(call)
        self._watch_parts(added)
        return added

    def inside(self, model: nn.Module, path: str, call: Arguments, before: Snapshot | None = None) -> list[GraphRunner]:
        """Runners of the modules that an island calls in this call and that no program was made of before.

        Args:
            model: of which the island is a part.
            path: the island's.
            before: what it held before the call; None where that is no matter.
        """
        island = model.get_submodule(path)
        state: forward_state.State = {}  # what is noted on the model itself is put back with the rest
        with _extending:
            known = runners(model)
            with holding(before, island):
                captured = self._captured(island, path, call, known=known)
                forward_state.note(state, island, path, captured.state)
            self.state.update({name: value for name, value in state.items() if name not in self.state})
            self.called |= captured.called
            self.islands.update(captured.islands)
            modules = dict(model.named_modules(remove_duplicate=False))
            fused = {
                name: fuse(graph, modules[name], self.recipe, within(captured.unlike_in_training, name))
                for name, graph in captured.graphs.items()
            }
            one_form = add_shared({name: one.fused for name, one in known.items()}, fused, modules)
            self.islands.update(one_form)
            return [self.install(modules[name], one) for name, one in fused.items() if name not in one_form]

    def part(self, around: GraphRunner, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphRunner | None:
        """Capture a part that is called by itself (`called_alone.py`); returns its runner, or None where that fails.

        Args:
            around: runs the module whose graph sees through the part.
            name: the part's name within that module.
        """
        module, path = around.root.get_submodule(name), full_name(around.graph.path, name)
        with _extending:
            known = runner_in(module)
            if isinstance(known, GraphRunner):  # another thread's call was first
                return known
            captured = self._captured(module, path, copied((args, kwargs)), called_by_user=True)
            if path not in captured.graphs:
                return None
            self.called |= captured.called
            self.islands.update(captured.islands)
            floats = _inside(name, around.fused)
            added = self.install(module, fuse(captured.graphs[path], module, self.recipe, floats, self.rules))
            added.alone, added.example = True, encode((args, kwargs))
            _share(around, added)
            _note_layers(around, added)
            return added

    def _captured(self, root: nn.Module, path: str, call: Arguments, **options: Any) -> Capture:
        """`capture_call` of a module: of others in place of it and of those within it, since threads may call them
        meanwhile, or where there can be no others, of itself."""
        other = unprepared(root, call)
        if other is not None:
            self._refuse_another_way(other, path, call)
            captured = capture_call(other, path, call, self.islands, training=self.training, **options)
            if not reach([captured.graphs], set(map(id, other.modules()))):
                return captured
        with _own_forwards(root):
            self._refuse_another_way(root, path, call)
            return capture_call(root, path, call, self.islands, training=self.training, **options)

    def _refuse_another_way(self, module: nn.Module, path: str, call: Arguments) -> None:
        start = f"{path}." if path else ""
        inside = {name.removeprefix(start): half for name, half in self.halves.items() if name.startswith(start)}
        refuse_another_way(module, path, call, inside)

    def _watch_parts(self, runner: GraphRunner) -> None:
        if not self.training:
            watch_parts(runner, self.part)

    def add(self, first: GraphRunner, fused: FusedGraph) -> GraphRunner:
        """Add a program to the module of `first`, by its fused graph."""
        added = self._runner(first.root, fused)
        added.train(first.training)
        _share(first, added)
        added.follow(first)
        first.others.append(added)
        return added

    def _runner(self, module: nn.Module, fused: FusedGraph) -> GraphRunner:
        with tensors_on(device_of(module)):
            return self.make(module, fused)

    def install(self, module: nn.Module, fused: FusedGraph) -> GraphRunner:
        """Make a module run a fused graph."""
        runner = self._runner(module, fused)
        runner.train(module.training)
        waits = waiting(module)
        runner.own_forward = module.__dict__.get("forward") if waits is None else waits.own_forward
        runner.extend = self
        # Another thread may be going through its children; add_module would call a `__getattr__` of the user's.
        module.__dict__["_modules"] = {**module._modules, RESERVED: runner}
        module.__dict__["forward"] = as_forward(runner.run, module, runner.own_forward)
        self._watch_parts(runner)
        return runner


_extending = Turns()
"""Programs are added one at a time: what is known of the whole model is read and written."""


@contextlib.contextmanager
def _own_forwards(root: nn.Module) -> Iterator[None]:
    """Run the user's forwards within the context, in a module and all modules within it, which have the user's children
    alone."""
    with contextlib.ExitStack() as undo:
        for runner in runners(root).values():
            undo.enter_context(without_runner(runner))
            forward = runner.root.__dict__.pop("forward")
            undo.callback(runner.root.__dict__.__setitem__, "forward", forward)
            if runner.own_forward is not None:
                runner.root.__dict__["forward"] = runner.own_forward
        undo.enter_context(not_waiting(root))
        yield


def _inside(name: str, fused: FusedGraph) -> dict[str, str]:
    """The layers of a part that the module around it leaves float, by their names in the part, and why."""
    return {layer.removeprefix(f"{name}."): why for layer, why in fused.floats.items() if layer.startswith(f"{name}.")}


def _note_layers(around: GraphRunner, added: GraphRunner) -> None:
    """Note the layers called by both a part's program and the programs around it: they have one bias and two inputs."""
    programs = [*around.programs(), added]
    for one in programs:
        others = frozenset().union(*(layers_of(other) for other in programs if other.graph.path != one.graph.path))
        path = one.graph.path
        both = (layer for layer in layers_of(one) if layer in others)
        one.fused.shared |= {layer.removeprefix(f"{path}.") if path else layer for layer in both}


def _share(first: GraphRunner, added: GraphRunner) -> None:
    """Give a new program's values the observers of the same places in the earlier programs."""
    known: dict[Any, nn.Module] = {}
    for runner in first.programs():
        places = _places(runner.graph)
        for slot in runner.fused.slots.values():
            known.setdefault(_place(slot, places, runner.graph), runner.observer(slot.name))
        for layer, key in runner.mean_keys().items():
            known.setdefault(("mean", runner.graph.path, layer), runner.means[key])
    places = _places(added.graph)
    for slot in added.fused.slots.values():
        observer = known.get(_place(slot, places, added.graph))
        if observer is not None:
            added.set_observer(slot.name, observer)
    for layer, key in added.mean_keys().items():
        added.means[key] = known.get(("mean", added.graph.path, layer), added.means[key])


def _place(slot: Slot, places: list[Any], graph: Graph) -> Any:
    inner = tuple((full_name(graph.path, layer), name) for layer, name in slot.inner)
    return places[slot.observed[0]] if slot.observed else inner, slot.qconfig


def _places(graph: Graph) -> list[Any]:
    """For each node, a key of its place in all programs of a module: the caller, the callee, what the call reads of the
    model, and how many like it came before.
    """
    counts: Counter[Any] = Counter()
    places = []
    for node in graph.nodes:
        what = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        # By full names, so that a part's program and those of the module around it have the same places.
        what = full_name(graph.path, what) if node.kind is Kind.MODULE else what
        read = [full_name(graph.path, one.path) for one in leaves((node.args, node.kwargs)) if isinstance(one, Attr)]
        key = (node.kind, full_name(graph.path, node.owner), what, *read)
        places.append((*key, counts[key]))
        counts[key] += 1
    return places
