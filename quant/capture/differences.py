"""Compares two recordings of a module: the first difference in their calls, and the module that causes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from quant.capture.recorder import Recorder
from quant.capture.tape import GIVEN
from quant.capture.trained_norms import graph_of
from quant.dead_calls import needed_places
from quant.graph import Kind
from quant.runtime.objects import Given, Instance, Result, compares_itself
from quant.runtime.trees import Attr, Ref, leaves, map_leaves

_LEAVES = (Ref, Attr, type(None), bool, int, float, str)


def problem_of(one: Recorder, other: Recorder) -> tuple[str, str] | None:
    for name, reason in other.problems.items():
        inner = name.removeprefix(one.path).removeprefix(".") if one.path else name
        return inner, reason.removeprefix("its forward ")
    return None


def decides_otherwise(one: Recorder, other: Recorder, *, sizes_differ: bool) -> bool:
    """Whether the first difference is a branch on a size, or on values of a mask, which a guard of the graph checks.

    Args:
        sizes_differ: whether the second call was given other sizes or numbers; else a guard on them shows a fault.
    """
    place = _first_other_call(one, other)
    if place is None or place >= min(len(one.nodes), len(other.nodes)):
        return False
    a, b = one.nodes[place], other.nodes[place]
    if not (a.kind == b.kind is Kind.GUARD and _alike(a.args[0], b.args[0])):
        return False
    return sizes_differ or (type(a.args[1]) is bool and one.follows_from(a.args[0]) == GIVEN)


def difference(one: Recorder, other: Recorder) -> tuple[str, str] | None:
    """The module that causes the first difference other than in values, and the reason; None without a difference."""
    for (_, owner, a), (_, _, b) in zip(one.foreign, other.foreign, strict=False):
        if a is not b:
            return owner, "reads a tensor that was created outside of torch, or where no calls are recorded"
    place = _first_other_call(one, other)
    for a, b in zip(one.spans, other.spans, strict=False):
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
    """The module that causes a difference at a call of `owner`, which may only have got other arguments."""
    caller = ""
    for span in reversed(one.spans):  # spans are noted when they end, so callers come first
        inside = span.start <= place <= span.end and f"{owner}.".startswith(f"{span.path}.")
        same_calls = (
            counterpart
            for counterpart in other.spans
            if (counterpart.path, counterpart.start) == (span.path, span.start)
        )
        if not inside or (counterpart := next(same_calls, None)) is None:
            continue
        if not _alike(span.arguments, counterpart.arguments):
            return caller
        caller = span.path
    return owner


def _without_repeated(one: Any, other: Any) -> Any:
    """The first recording's output without the constants written on the module, which a second call finds there."""
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


def needs_alike(one: Recorder, other: Recorder) -> bool:
    """Whether two recordings differ at most in calls whose values are not read."""
    if len(one.foreign) != len(other.foreign) or any(
        a[2] is not b[2] for a, b in zip(one.foreign, other.foreign, strict=True)
    ):
        return False
    calls, others = _numbered(one), _numbered(other)
    return len(calls) == len(others) and all(
        a[0] == b[0] and _alike(a[1], b[1]) for a, b in zip(calls, others, strict=True)
    )


def _numbered(recorder: Recorder) -> list[tuple[Any, Any]]:
    """The needed calls with their arguments, renumbered; the output comes last."""
    places = {index: place for place, index in enumerate(_needed(recorder))}

    def renumbered(tree: Any) -> Any:
        return map_leaves(lambda leaf: Ref(places[leaf.index]) if isinstance(leaf, Ref) else leaf, tree)

    nodes = [recorder.nodes[index] for index in places]
    calls = [((node.kind, node.owner, node.target), renumbered((node.args, node.kwargs))) for node in nodes]
    return [*calls, (None, renumbered(recorder.output))]


def _needed(recorder: Recorder) -> list[int]:
    return needed_places(graph_of(recorder))


def _writer(one: Result, other: Result) -> str:
    """The module with an attribute that the two calls write differently."""
    targets = {write.target: write for write in other.writes if isinstance(write.target, str)}
    for write in one.writes:
        if isinstance(write.target, str):
            counterpart = targets.pop(write.target, None)
            if counterpart is None or not _alike(write.value, counterpart.value):
                return write.target.rpartition(".")[0]
    return next(iter(targets), "").rpartition(".")[0]


def _first_other_call(one: Recorder, other: Recorder) -> int | None:
    """The first node at which two recordings have different calls."""
    for place, (a, b) in enumerate(zip(one.nodes, other.nodes, strict=False)):
        same_call = a.kind == b.kind and a.owner == b.owner and (a.target is b.target or a.target == b.target)
        if not same_call or not _alike((a.args, a.kwargs), (b.args, b.kwargs)):
            return place
    return None if len(one.nodes) == len(other.nodes) else min(len(one.nodes), len(other.nodes))


def _alike(one: Any, other: Any) -> bool:
    """Whether two trees of places have the same constants at their leaves."""
    kind = type(one)
    if kind is type(other):  # nearly always, and most of a proof's time
        if kind in (tuple, list) and len(one) == len(other):
            return all(map(_alike, one, other))
        if kind is dict and all(type(key) is str for key in one) and [*one] == [*other]:
            return all(map(_alike, one.values(), other.values()))
        if kind in _LEAVES:
            return _same_leaf(one, other)
    first, second = list(leaves(one)), list(leaves(other))
    if len(first) != len(second) or list(_keys(one)) != list(_keys(other)):
        return False
    return all(map(_same_leaf, first, second))


def _keys(tree: Any) -> Iterator[Any]:
    """The string and number keys of the dicts in a tree, in order."""
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
        # Objects that compare by identity were created in the forward, and hold no value of the graph.
        return not compares_itself(type(one)) or bool(one == other)
    except Exception:  # a comparison of the user's own
        return False
