"""Further programs of a captured module: for calls of another structure than those that were captured before.

A mask that is there or not, a cache that is empty or filled, another branch on a size: each such call is captured by
itself, up to `MOST_PROGRAMS` of a module, when it comes. Values that are made at the same place share their observers,
so that a layer has the same ranges in all programs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from quant import lasting
from quant.capture import capture_call
from quant.fuse import Plan, Slot, make_plan
from quant.graph import Graph
from quant.recipe import Recipe
from quant.static.arguments import copied
from quant.static.examples import encode
from quant.static.runner import RESERVED, GraphRunner, runners

MakeRunner = Callable[[nn.Module, Plan], GraphRunner]
"""Makes the runner of a plan, for calibration or for training."""


@dataclass
class Extender:
    """Makes one more program of a module for a call; the `extend` of a `GraphRunner`.

    Attributes:
        recipe, islands, called, training: of the prepared model; islands and calls that are found are added.
        state: what forwards change of the model, as it was before any data; what a new program changes is added.
        make: makes the runner.
        refused: by module, why calls of it have no program; they count among `MOST_PROGRAMS`, for each was a capture.
    """

    recipe: Recipe
    islands: dict[str, str]
    called: set[str]
    state: lasting.State
    training: bool
    make: MakeRunner
    refused: dict[str, list[str]] = field(default_factory=dict)

    def __call__(self, first: GraphRunner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphRunner | None:
        """The runner of a program for this call, added to `first.others`; None where the module then is an island."""
        root, path = first.root, first.graph.path
        with _own_forwards(root):
            found = capture_call(root, path, copied((args, kwargs)), self.islands, training=self.training)
        self.called |= found.called
        new = [name for name in found.islands if name not in self.islands]
        lasting.note(self.state, root, path, {*found.state, *lasting.kept_by_islands(root, path, new)})
        for name, graph in found.graphs.items():
            module = root.get_submodule(name.removeprefix(path).removeprefix("."))
            if name != path and not isinstance(module._modules.get(RESERVED), GraphRunner):
                self.install(module, make_plan(graph, module, self.recipe))
        self.islands.update({name: why for name, why in found.islands.items() if name != path})
        if path not in found.graphs:
            self.refused.setdefault(path, []).append(found.islands.get(path, "it gives no graph"))
            return None
        plan = make_plan(found.graphs[path], root, self.recipe, first.plan.floats)
        plan.shared = first.plan.shared
        added = self.add(first, plan)
        added.example = encode((args, kwargs))
        return added

    def add(self, first: GraphRunner, plan: Plan) -> GraphRunner:
        """One more program of the module of `first`, by its plan."""
        added = self.make(first.root, plan)
        added.train(first.training)
        _share(first, added)
        added.follow(first)
        first.others.append(added)
        return added

    def install(self, module: nn.Module, plan: Plan) -> None:
        """Let a module run a plan."""
        runner = self.make(module, plan)
        runner.train(module.training)
        runner.own_forward, runner.extend = module.__dict__.get("forward"), self
        module.add_module(RESERVED, runner)
        module.__dict__["forward"] = runner.run


def keep_programs(first: GraphRunner, programs: Sequence[GraphRunner]) -> None:
    """Let a module have these programs, in this order, instead of `first` and those after it."""
    one, *others = programs
    one.others = nn.ModuleList(others)
    if one is not first:
        one.own_forward, one.extend = first.own_forward, first.extend
        first.root._modules[RESERVED] = one
        first.root.__dict__["forward"] = one.run


@contextlib.contextmanager
def _own_forwards(root: nn.Module) -> Iterator[None]:
    """Let the user's forwards run in place of captured ones, in a module and all that is in it."""
    found = list(runners(root).values())
    for runner in found:
        del runner.root.__dict__["forward"]
        if runner.own_forward is not None:
            runner.root.__dict__["forward"] = runner.own_forward
    try:
        yield
    finally:
        for runner in found:
            runner.root.__dict__["forward"] = runner.run


def _share(first: GraphRunner, added: GraphRunner) -> None:
    """Let a new program's values be observed by those who observe the same places in the first ones."""
    known: dict[Any, nn.Module] = {}
    for runner in (first, *first.others):
        assert isinstance(runner, GraphRunner)
        places = _places(runner.graph)
        for slot in runner.plan.slots.values():
            known.setdefault(_place(slot, places), runner.point(slot.name))
        for name, mean in runner.means.items():
            known.setdefault(("mean", name), mean)
    places = _places(added.graph)
    for slot in added.plan.slots.values():
        point = known.get(_place(slot, places))
        if point is not None:
            added.set_point(slot.name, point)
    for name in added.means:
        if ("mean", name) in known:
            added.means[name] = known["mean", name]


def _place(slot: Slot, places: list[Any]) -> Any:
    made = places[slot.observed[0]] if slot.observed else tuple(slot.inner)
    return made, slot.qconfig


def _places(graph: Graph) -> list[Any]:
    """Of each node what tells it from the others of a module's programs: who calls what, and which such call it is."""
    counts: Counter[Any] = Counter()
    found = []
    for node in graph.nodes:
        what = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        key = (node.kind, node.owner, what)
        found.append((*key, counts[key]))
        counts[key] += 1
    return found
