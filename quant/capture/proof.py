"""Recording until nothing is wrong with what was recorded: a second recording, and a run of the graph, must agree.

The module is recorded again on other values and other sizes. Whatever is not a value of the graph (numbers, tensors
made outside of torch, the calls themselves) must be the same in both; what differs by values makes the innermost module
an island, what differs by a size holds that size fixed. Then the graph is run on the second inputs, and must give what
the module gave, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from quant.arguments import ONE_MEMORY, Arguments, copied, share_memory
from quant.capture.called import tensors_in
from quant.capture.recorder import Recorder
from quant.capture.scalars import NUMBER, ROUNDED, Limit
from quant.capture.trained_norms import graph_of, settle_mode
from quant.capture.undisturbed import disturbed
from quant.capture.unlike_in_training import unlike_layers
from quant.capture.unseen import said_of
from quant.capture.variations import (
    UNCOVER,
    VARY,
    NoOther,
    Variation,
    groups_of,
    is_width,
    other_floats,
    other_values,
    same_values,
    varied,
)
from quant.capture.watched import Watched
from quant.dead_calls import needed_places
from quant.graph import Attr, CaptureMismatch, Ref, evaluate, leaves, map_leaves
from quant.names import full_name
from quant.objects import Given, Instance, Result, compares_itself

MOST_PASSES = 64
"""Each pass makes at least one module an island or holds one size, and few models have that many to find."""


class CaptureError(RuntimeError):
    """A model whose graph does not compute what the model computes, whatever is left out of it."""


def record(
    watched: Watched,
    module: nn.Module,
    path: str,
    call: Arguments,
    islands: MutableMapping[str, str],
    *,
    training: bool,
) -> Recorder:
    """The recording of one call of a module, with all islands in it known, and proved.

    Args:
        path: dotted name of the module.
        islands: by dotted name, why a module runs as it is; those that are found are added.
        training: as for `capture`.

    Raises:
        CaptureError: the graph's numbers are not the module's, and no island makes them so.
    """
    limits: tuple[Limit, ...] = ()
    for _ in range(MOST_PASSES):
        put_back = watched.snapshot()
        try:
            recorder = Recorder(module, path, islands, limits, training=training)
            try:
                run(watched, recorder, call)
                _refuse_shared_memory(recorder, call)
            except Exception as error:
                put_back()
                fails = _where_it_fails(recorder, call)
                if not fails:
                    raise error
                recorder.problems.update(fails)
            new = {name: reason for name, reason in recorder.problems.items() if name not in islands}
            if not new and path not in islands:
                proof = _Proof(watched, recorder, call)
                new, limits, whole = proof.problems, (*limits, *proof.limits), not proof.limits
                if not new and whole:
                    new = (_in_training if training else _with_gradients)(watched, recorder, call)
                new = {_answerable(recorder, name): reason for name, reason in new.items()}
                if not new and whole:
                    new = _undisturbed(watched, recorder, call, put_back)
                if not new and whole:
                    return recorder
            elif not new:
                return recorder
        finally:
            put_back()
        if new and not watched.has_run:
            # A first call fills caches, torch's own too (jagged tensors): only what a second one shows is always so.
            watched.has_run, limits = True, ()
            continue
        islands.update(new)
    raise CaptureError(
        f"{path or type(module).__name__}: {MOST_PASSES} attempts gave no graph that computes what the module does; "
        "quant.register_leaf(its class) runs it as it is"
    )


def _answerable(recorder: Recorder, name: str) -> str:
    """The innermost module around what is at fault that can be made an island: one that is called, and is none yet.

    A module may be only a holder of methods, or of an attribute that its parent's forward writes.
    """
    while name != recorder.path and (name not in recorder.called or name in recorder.islands):
        name = name.rpartition(".")[0]
    return name


def run(watched: Watched, recorder: Recorder, call: Arguments) -> None:
    """Record a call, on copies of its tensors."""
    args, kwargs = copied(call[0]), copied(call[1])
    recorder.tensors = tensors_in((args, kwargs))
    with watched.telling(recorder):
        if recorder.path in recorder.islands:
            forward: Any = recorder.root.__dict__["forward"]
            recorder.run_inside(recorder.path, recorder.root, args, kwargs, forward)
        else:
            recorder.run(args, kwargs)


def _refuse_shared_memory(recorder: Recorder, call: Arguments) -> None:
    """Arguments are recorded each by itself, so that a write to one is not seen in another that it is too."""
    if any(node.writes for node in recorder.nodes) and share_memory(tensors_in(call)):
        recorder.problem("", ONE_MEMORY)


def _where_it_fails(recorder: Recorder, call: Arguments) -> dict[str, str]:
    """The module whose forward raises an error because it is recorded; none where the error is the model's own.

    Pickle, higher-order operators and transforms of torch refuse numbers that take notes, or a mode that looks on.
    """
    args, kwargs = copied(call[0]), copied(call[1])
    recorder.root.__dict__["forward"](*args, **kwargs)  # the model's own error, without ours above it
    if recorder.failed is None or recorder.failed[0] in recorder.islands:
        return {}
    name, error = recorder.failed
    return {name: f"its forward cannot be recorded ({said_of(error)})"}


def _undisturbed(watched: Watched, recorder: Recorder, call: Arguments, put_back: Callable[[], None]) -> dict[str, str]:
    """The module that does something else when it is recorded."""
    name = disturbed(watched, recorder, call, put_back)
    if name is None:
        return {}
    return {full_name(recorder.path, name): "its forward does something else when it is recorded"}


def _in_training(watched: Watched, recorder: Recorder, call: Arguments) -> dict[str, str]:
    """The modules that do something else in training mode, with gradients, than what was recorded in eval mode.

    A call that is told `training=False` in both is so in training too.
    """
    modes = {module: module.training for module in recorder.root.modules()}
    try:
        for module in modes:
            module.training = True
        other = _recorded_with_gradients(watched, recorder, call, training=True)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if other is None:
        return {}
    settle_mode(recorder, other)
    fault = _unlike(recorder, other, "other values", "training")
    if fault:
        watched.unlike_in_training.update(full_name(recorder.path, name) for name in unlike_layers(recorder, other))
    return fault


def _with_gradients(watched: Watched, recorder: Recorder, call: Arguments) -> dict[str, str]:
    """The module that does something else with gradients than without; only forwards that ask are tried."""
    if not any(map(_asks_for_gradients, recorder.root.modules())):
        return {}
    other = _recorded_with_gradients(watched, recorder, call, training=False)
    return {} if other is None else _unlike(recorder, other, "for other values", "with gradients")


def _recorded_with_gradients(
    watched: Watched, recorder: Recorder, call: Arguments, *, training: bool
) -> Recorder | None:
    """The same call once more, with gradients; None where the module refuses it so."""
    other = recorder.again(training=training)
    put_back = watched.state()
    try:
        with torch.enable_grad():
            run(watched, other, call)
    except (
        Exception
    ):  # batch norms refuse a single value per channel, for one; what refuses gradients is called without
        return None
    finally:
        put_back()
    return other


def _unlike(recorder: Recorder, other: Recorder, usual: str, here: str) -> dict[str, str]:
    """The module that does something else in the other recording; calls that nobody reads do not count.

    Args:
        usual, here: the words of the reason, and those to be put in their place.
    """
    fault = _problem(recorder, other) or _difference(recorder, other)
    if fault is None or (not other.problems and _needs_alike(recorder, other)):
        return {}
    return {full_name(recorder.path, fault[0]): f"its forward {fault[1].replace(usual, here)}"}


def _asks_for_gradients(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "is_grad_enabled" in code.co_names


class _Proof:
    """One attempt to show that a recording stands for other calls too.

    Attributes:
        problems: by dotted name, why modules have to run as they are.
        limits: sizes and numbers that have to be held.
    """

    def __init__(self, watched: Watched, recorder: Recorder, call: Arguments) -> None:
        self.watched, self.recorder, self.call = watched, recorder, call
        self.problems: dict[str, str] = {}
        self.limits: tuple[Limit, ...] = ()
        self._alike: set[int] = set()
        self._decided = False
        held = {(limit.place, limit.dim) for limit in recorder.limits}
        groups = [group for group in groups_of(recorder) if not held & {(one.place, one.dim) for one in group}]
        every = [limit for group in groups for limit in group]
        if self._holds(other_values, every, VARY[:1]) or (self.problems and not every):
            return
        # Most models hold the width of a layer to what it is, and refuse another before they compute much.
        widths = [group for group in groups if any(is_width(one, recorder) for one in group)]
        others = [group for group in groups if group not in widths]
        if widths and others and self._holds(other_values, [limit for group in others for limit in group], VARY[:1]):
            self._hold_where_unlike(other_values, widths)
            return
        # What differs by values is a module's own; what differs by one size alone is that size's.
        self.problems = {}
        values: Variation = same_values
        for change in (other_values, other_floats, same_values):
            agrees = self._agrees(change, [])
            if agrees is False:
                return
            if agrees:
                values = change
                break
        self._hold_where_unlike(values, groups)

    def _hold_where_unlike(self, values: Variation, groups: list[list[Limit]]) -> None:
        """Hold the sizes that change what is recorded."""
        self.problems = {}
        for group in groups:
            agrees = self._holds(values, group, VARY)
            # A size that no other takes the place of is the module's own; a number may be taken unseen.
            if agrees is False or (agrees is None and group[0].dim == NUMBER):
                self.limits += tuple(group)
            self.problems = {}

    def _holds(self, values: Variation, limits: list[Limit], steps: tuple[str, ...]) -> bool | None:
        """As `_agrees`, by the first of several steps that the module takes, and others where that one shows little.

        Where rounded numbers have never changed, they are held.
        """
        self._decided, found = False, None
        for step in steps:
            found = self._agrees(values, limits, step)
            if found is not None:
                break
        alike = self._alike if found else set()
        if alike or (found is None and self._decided):
            for step in UNCOVER:
                further = self._agrees(values, limits, step)
                if further is False:
                    return False
                alike &= self._alike if further else alike
                found = found or further
                if further and not alike:
                    break
        self.limits += tuple(Limit(place, ROUNDED) for place in sorted(alike))
        return found

    def _agrees(self, values: Variation, limits: list[Limit], step: str = VARY[0]) -> bool | None:
        """Whether another call has the same recording, and the graph its output; None where the module refuses it."""
        try:
            call = varied(self.recorder.root, self.call, values, limits, step)
        except NoOther:
            return None
        other = self.recorder.again(training=self.recorder.training)
        before = self.watched.state()
        try:
            run(self.watched, other, call)
        except Exception:  # the module's own, or torch's: it does not take such a call
            before()
            return None
        after = self.watched.state()
        if limits and _decides_otherwise(self.recorder, other):
            self._decided = True
            return None
        fault = _difference(self.recorder, other) or _problem(self.recorder, other)
        if fault is None:
            before()
            if _computes(self.recorder, other, call):
                after()
                self._alike = _alike_by_rounding(self.recorder, other) if limits else set()
                return True
            fault = ("", "gives other numbers than its captured calls")
        after()
        self.problems = {full_name(self.recorder.path, fault[0]): f"its forward {fault[1]}"}
        return False


def _alike_by_rounding(one: Recorder, other: Recorder) -> set[int]:
    """The rounded numbers, by their places, that are the same in two recordings although what they are made of is not.

    Where Python counts by one of them unseen, the recordings could not tell.
    """
    guarded = {node.args[0].index for node in one.nodes if node.kind == "guard" and isinstance(node.args[0], Ref)}
    places = {index: place for place, index in enumerate(one.rounded) if index not in guarded}
    moved: set[int] = set()
    found = set()
    for node in one.nodes:
        mine, theirs = one.values[node.index], other.values[node.index]
        if isinstance(mine, (int, float)) and mine != theirs:
            moved.add(node.index)
        elif node.index in places and moved.intersection(node.refs):
            found.add(places[node.index])
    return found


def _problem(one: Recorder, other: Recorder) -> tuple[str, str] | None:
    for name, reason in other.problems.items():
        inner = name.removeprefix(one.path).removeprefix(".") if one.path else name
        return inner, reason.removeprefix("its forward ")
    return None


# ---------------------------------------------------------------------------------------------------- comparing


def _decides_otherwise(one: Recorder, other: Recorder) -> bool:
    """Whether the first difference is a decision by a size, which a guard of the graph sees."""
    place = _first_other_call(one, other)
    if place is None or place >= min(len(one.nodes), len(other.nodes)):
        return False
    a, b = one.nodes[place], other.nodes[place]
    return a.kind == b.kind == "guard" and _alike(a.args[0], b.args[0])


def _difference(one: Recorder, other: Recorder) -> tuple[str, str] | None:
    """The module at fault for the first difference that is none of values, and what it does."""
    for (_, owner, a), (_, _, b) in zip(one.foreign, other.foreign, strict=False):
        if a is not b:
            return owner, "reads a tensor that was made outside of torch, or where no calls are seen"
    place = _first_other_call(one, other)
    for a, b in zip(one.regions, other.regions, strict=False):
        if (place is None or a.end <= place) and not _alike(a.output, b.output):
            return a.path, "gives a value that follows from its inputs unseen"
    if place is not None:
        owner = one.nodes[place].owner if place < len(one.nodes) else other.nodes[place].owner
        return _at_fault(one, other, owner, place), "does something else for other values"
    if not _alike(_without_repeated(one.output, other.output), other.output):
        writes = isinstance(one.output, Result) and isinstance(other.output, Result)
        if writes and _alike(one.output.value, other.output.value):
            return _writer(one.output, other.output), "changes its state in a way that no graph shows"
        return "", "gives a value that follows from its inputs unseen"
    return None


def _at_fault(one: Recorder, other: Recorder, owner: str, place: int) -> str:
    """The module that makes two recordings part at a call of `owner`: who was called with other things only follows."""
    caller = ""
    for region in reversed(one.regions):  # noted when they end: callers come first
        inside = region.start <= place <= region.end and f"{owner}.".startswith(f"{region.path}.")
        twins = (twin for twin in other.regions if (twin.path, twin.start) == (region.path, region.start))
        if not inside or (twin := next(twins, None)) is None:
            continue
        if not _alike(region.arguments, twin.arguments):
            return caller
        caller = region.path
    return owner


def _without_repeated(one: Any, other: Any) -> Any:
    """The first output without the constants that it wrote on the module: a second call finds them there already."""
    if type(one) is not Result:
        return one
    again = {write.target for write in other.writes} if type(other) is Result else set()
    writes = tuple(
        write
        for write in one.writes
        if not isinstance(write.target, str) or write.target in again or not _is_constant(write.value)
    )
    return Result(one.value, writes) if writes or type(other) is Result else one.value


def _is_constant(tree: Any) -> bool:
    return not any(isinstance(leaf, (Ref, Attr, Given, Tensor)) for leaf in leaves(tree))


def _needed(recorder: Recorder) -> list[int]:
    return needed_places(graph_of(recorder))


def _needs_alike(one: Recorder, other: Recorder) -> bool:
    """Whether two recordings differ in nothing but calls whose values nobody reads."""
    if len(one.foreign) != len(other.foreign) or any(
        a[2] is not b[2] for a, b in zip(one.foreign, other.foreign, strict=True)
    ):
        return False
    calls, twins = _numbered(one), _numbered(other)
    return len(calls) == len(twins) and all(
        a[0] == b[0] and _alike(a[1], b[1]) for a, b in zip(calls, twins, strict=True)
    )


def _numbered(recorder: Recorder) -> list[tuple[Any, Any]]:
    """What is called with what, of the calls that are needed, numbered among themselves; the output is the last."""
    places = {index: place for place, index in enumerate(_needed(recorder))}

    def renumbered(tree: Any) -> Any:
        return map_leaves(lambda leaf: Ref(places[leaf.index]) if isinstance(leaf, Ref) else leaf, tree)

    nodes = [recorder.nodes[index] for index in places]
    calls = [((node.kind, node.owner, node.target), renumbered((node.args, node.kwargs))) for node in nodes]
    return [*calls, (None, renumbered(recorder.output))]


def _writer(one: Result, other: Result) -> str:
    """The module whose attribute is written otherwise in another call."""
    targets = {write.target: write for write in other.writes if isinstance(write.target, str)}
    for write in one.writes:
        if isinstance(write.target, str):
            twin = targets.pop(write.target, None)
            if twin is None or not _alike(write.value, twin.value):
                return write.target.rpartition(".")[0]
    return next(iter(targets), "").rpartition(".")[0]


def _first_other_call(one: Recorder, other: Recorder) -> int | None:
    """The first place where two recordings are not the same call."""
    for place, (a, b) in enumerate(zip(one.nodes, other.nodes, strict=False)):
        same_call = a.kind == b.kind and a.owner == b.owner and (a.target is b.target or a.target == b.target)
        if not same_call or not _alike((a.args, a.kwargs), (b.args, b.kwargs)):
            return place
    return None if len(one.nodes) == len(other.nodes) else min(len(one.nodes), len(other.nodes))


def _alike(one: Any, other: Any) -> bool:
    """Whether two trees of places have the same constants at their leaves."""
    first, second = list(leaves(one)), list(leaves(other))
    if len(first) != len(second) or list(_keys(one)) != list(_keys(other)):
        return False
    return all(map(_same_leaf, first, second))


def _keys(tree: Any) -> Iterator[Any]:
    """The keys of the dicts in a tree that are texts or numbers, in order."""
    if isinstance(tree, Mapping):
        yield from (key for key in tree if isinstance(key, (str, int, float)))
        parts: Any = tree.values()
    elif type(tree) is Instance:
        parts = tree.attributes, tree.items
    elif type(tree) is Result:
        parts = tree.value, *(write.value for write in tree.writes)
    else:
        parts = tree if isinstance(tree, (list, tuple)) and type(tree) is not torch.Size else ()
    for part in parts:
        yield from _keys(part)


def _same_leaf(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return False
    if isinstance(one, numpy.ndarray):
        return bool(numpy.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    try:
        # Objects that compare by identity were made in the forward, and hold no value of the graph.
        return not compares_itself(type(one)) or bool(one == other)
    except Exception:  # a comparison of the user's own
        return False


def _computes(one: Recorder, other: Recorder, call: Arguments) -> bool:
    """Whether the calls of the first recording, made with the second's inputs, give what the second call gave."""
    again = Recorder(one.root, one.path, one.islands, one.limits)
    inputs = again.take_inputs(copied(call[0]), copied(call[1]))
    values: dict[int, Any] = {}
    with _seeded():
        try:
            for node in one.nodes:
                values[node.index] = (
                    inputs[node.index] if node.kind == "input" else evaluate(node, one.root, values.__getitem__)
                )
        except CaptureMismatch:
            return True  # a guard says that this call is another one
    real = map_leaves(lambda leaf: values[leaf.index] if isinstance(leaf, Ref) else leaf, one.output)
    expected = map_leaves(lambda leaf: other.values[leaf.index] if isinstance(leaf, Ref) else leaf, other.output)
    return all(_same_bits(a, b) for a, b in zip(_tensors(real), _tensors(expected), strict=True))


def _seeded() -> Any:
    return torch.random.fork_rng(devices=[])


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout != torch.strided or one.is_nested:
        return True
    return bool(torch.equal(one, other)) or bool(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True))
