"""Finds the parameters that a user's forward reads and int8 layers replace (`runtime/restored_weights.py`)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from quant.capture.attribute_reads import reads_of
from quant.folding import Transposed, parameter, paths_behind
from quant.fusion.fused_graph import FusedGraph
from quant.graph import Graph, Kind, Node
from quant.ops.operator import Weighted
from quant.ops.step import Step
from quant.runtime.names import attribute, child_name, full_name, submodule
from quant.runtime.restored_weights import (
    DIVIDE,
    PERMUTE,
    RESHAPE,
    SUBTRACT,
    RestoredTensor,
    Undo,
    WeightsToRestore,
    is_gone,
)
from quant.runtime.trees import Attr, Ref, leaves

SAME = 0.01
"""What is computed from a weight, by a factor or once more, may differ by this much of it: a normalised one does."""

SMALL = 1e-4
"""And by this much of the largest value of its row, where a mean was taken off."""

MOST_DIMS = 6
"""Of a weight whose dimensions are tried in all orders."""


def weights_to_restore(fused: FusedGraph, root: nn.Module, model: nn.Module) -> WeightsToRestore:
    """Those of the functional layers of a captured module `root` of a model."""
    held: dict[str, list[tuple[RestoredTensor, slice]]] = {}
    for step in fused.steps:
        if isinstance(step.operator, Weighted) and fused.graph.nodes[step.nodes[0]].kind is not Kind.MODULE:
            for tensor, rows in _tensors(step, step.operator, fused, root, model):
                held.setdefault(tensor.path, []).append((tensor, rows))
    return WeightsToRestore(one for path, parts in held.items() for one in _whole(parts, attribute(root, path)))


def _whole(parts: list[tuple[RestoredTensor, slice]], like: Tensor) -> list[RestoredTensor]:
    """What makes a parameter of what layers hold of it: all of it, or slices in the order of its rows; or nothing.

    Rows that no layer holds are lost, and with them the parameter: less of it would be another one, silently.
    """
    if known := [one for one, _ in parts if not one.sliced and one.undo is not None]:
        return known
    slices, row = dict[tuple[int, int], RestoredTensor](), 0
    for one, rows in parts:
        if one.sliced and all(bound is None or type(bound) is int for bound in (rows.start, rows.stop, rows.step)):
            first, last, step = rows.indices(len(like))
            if step == 1 and first < last:
                slices.setdefault((first, last), one)
    for first, last in sorted(slices):
        row = last if first == row else -1
    if slices and row == len(like):
        return [slices[rows] for rows in sorted(slices)]
    return [parts[0][0]._replace(sliced=False, undo=None)]


def few_numbers(step: Step, layer: Weighted, fused: FusedGraph, root: nn.Module) -> set[str]:
    """The parameters with at most one number for each row of a weight that is computed of them and others.

    They stay, as those do that are folded in: the user's forward may have to run.
    """
    node, few = fused.graph.nodes[step.nodes[0]], set[str]()
    for name, value in (("weight", layer.weight), ("bias", layer.bias)):
        if any(is_gone(root, path) for path in paths_behind(fused.graph, value)):
            continue  # another captured module had the same weight, and nothing of it was few
        source, _ = _before_moves(value, fused.graph, root)
        behind = paths_behind(fused.graph, source)
        if isinstance(source, Ref) and not _is_parametrized(node.owner, name, behind, root):
            made = parameter(source, fused.graph, root)
            assert made is not None
            few |= {path for path in behind if attribute(root, path).numel() <= max(made.shape[:1], default=1)}
    return few


def _tensors(
    step: Step, layer: Weighted, fused: FusedGraph, root: nn.Module, model: nn.Module
) -> Iterator[tuple[RestoredTensor, slice]]:
    """What a layer holds of parameters, and of slices which rows."""
    key, graph, every = child_name(step.name), fused.graph, slice(None)
    few = few_numbers(step, layer, fused, root)
    for is_weight, value in ((True, layer.weight), (False, layer.bias)):
        source, undo = _before_moves(value, graph, root)
        if isinstance(source, Attr):
            yield RestoredTensor(source.path, False, key, is_weight, undo), every
        elif isinstance(source, Ref):
            node = graph.nodes[source.index]
            if node.target is operator.getitem and isinstance(node.args[1], slice) and isinstance(node.args[0], Attr):
                yield RestoredTensor(node.args[0].path, True, key, is_weight, undo), node.args[1]
                continue
            owner, name = graph.nodes[step.nodes[0]].owner, "weight" if is_weight else "bias"
            own, behind = full_name(owner, name), paths_behind(graph, source)
            if _is_parametrized(owner, name, behind, root):
                yield RestoredTensor(own, False, key, is_weight, undo), every
                continue
            path, by_rows = _by_rows(source, behind, graph, root)
            if path:
                yield RestoredTensor(path, False, key, is_weight, (*undo, *by_rows)), every
            elif _is_computed_alike(source, own, graph, root) and not read_elsewhere(model, root, own):
                path = own
                yield RestoredTensor(own, False, key, is_weight, undo), every
            lost = sorted(behind - few - {path})
            yield from ((RestoredTensor(one, False, key, is_weight, None), every) for one in lost)


def read_elsewhere(model: nn.Module, root: nn.Module, path: str) -> bool:
    """Whether the code of some forward may read a parameter otherwise than for the one layer that is made of it."""
    owner, _, name = path.rpartition(".")
    return reads_of(model, submodule(root, owner), name) > 1


def _before_moves(value: Any, graph: Graph, root: nn.Module) -> tuple[Any, Undo]:
    """What a value is before calls that only rearrange or scale it, and what takes these back, the last one first."""
    undo: list[tuple[str, Any]] = []
    if isinstance(value, Transposed):
        value = value.source
        undo.append((PERMUTE, (1, 0)))
    while isinstance(value, Ref):
        move = _move(graph.nodes[value.index], graph, root)
        if move is None:
            break
        value, taken_back = move
        undo.append(taken_back)
    return value, tuple(undo)


def _move(node: Node, graph: Graph, root: nn.Module) -> tuple[Any, tuple[str, Any]] | None:
    """The tensor that a call rearranges or multiplies by a number, and what takes that back; None of other calls.

    Judged by what the call makes of numbers that are all different: it may be any of torch's. What it makes of the
    tensor itself must agree: a call that divides by a norm multiplies each tensor by another number.
    """
    places = dict.fromkeys(leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, (Attr, Ref)))
    read = {place: parameter(place, graph, root) for place in places}
    sources = [place for place, one in read.items() if isinstance(one, Tensor) and one.is_floating_point()]
    if len(sources) != 1 or any(isinstance(leaf, Tensor) for leaf in leaves((node.args, node.kwargs))):
        return None
    [source] = sources
    real = read[source]
    assert real is not None
    before = _numbered(real)
    try:
        after = parameter(Ref(node.index), graph, root, {source: before.clone()})
        really = parameter(Ref(node.index), graph, root, {source: real.clone()})
    except Exception:  # the user's own, or torch's, about such numbers
        return None
    if not isinstance(after, Tensor) or after.dtype != before.dtype or after.numel() != before.numel():
        return None
    assert really is not None
    if torch.equal(after.flatten(), before.flatten()):
        return (source, (RESHAPE, tuple(before.shape))) if torch.equal(really.flatten(), real.flatten()) else None
    for dims in itertools.permutations(range(before.dim())) if before.dim() <= MOST_DIMS else ():
        moved = before.permute(dims)
        if moved.shape == after.shape and torch.equal(moved, after) and torch.equal(real.permute(dims), really):
            return source, (PERMUTE, tuple(map(dims.index, range(len(dims)))))
    factor = float(after.flatten()[0]) if after.numel() else 0.0
    if factor and after.shape == before.shape and torch.allclose(after, factor * before, atol=0.0):
        return (source, (DIVIDE, factor)) if torch.allclose(really, factor * real, SAME, 0.0) else None
    return None


def _numbered(like: Tensor | None) -> Tensor:
    """1, -2, 3, -4, ... in the shape of a tensor."""
    assert like is not None
    numbers = torch.arange(1.0, like.numel() + 1)
    numbers[1::2] *= -1
    return numbers.reshape(like.shape)


def _by_rows(value: Ref, behind: set[str], graph: Graph, root: nn.Module) -> tuple[str, Undo]:
    """The parameter whose rows a value has, each times a number and plus another, and what takes these back.

    So is what a weight becomes that is normalised, standardised, or multiplied by a gain. ('', ()) of other values.
    """
    after = parameter(value, graph, root)
    same = [path for path in sorted(behind) if after is not None and attribute(root, path).shape == after.shape]
    if len(same) != 1 or after is None or after.dim() < 2 or not after.is_floating_point():
        return "", ()
    before: Tensor = attribute(root, same[0])
    if not before.is_floating_point():
        return "", ()
    rows, results = before.detach().flatten(1).double(), after.detach().flatten(1).double()
    for shifted in (False, True):
        centre, offset = (one.mean(1, keepdim=True) if shifted else 0.0 for one in (rows, results))
        squares = (rows - centre).square().sum(1)
        factors = torch.where(squares > 0, ((results - offset) * (rows - centre)).sum(1) / squares, 1.0)
        shift = offset - centre * factors[:, None]
        room = SMALL * results.abs().amax(1, keepdim=True) if shifted else torch.zeros(len(rows), 1)
        wrong = (results - rows * factors[:, None] - shift).abs() > SAME * results.abs() + room
        if not wrong.any() and bool((factors != 0).all()) and bool(factors.isfinite().all()):
            undo = (DIVIDE, tuple(factors.tolist()))
            return same[0], (undo,) if not shifted else ((SUBTRACT, tuple(torch.as_tensor(shift)[:, 0].tolist())), undo)
    return "", ()


def _is_parametrized(owner: str, name: str, behind: set[str], root: nn.Module) -> bool:
    """Whether the module `owner` computes its attribute `name` of parts, and of all that is behind a value."""
    module = submodule(root, owner)
    if not parametrize.is_parametrized(module, name):
        return False
    computes: Any = module.parametrizations[name]  # type: ignore[index]
    parts = {id(one) for one in (*computes.parameters(), *computes.buffers())}
    return all(id(attribute(root, path)) in parts for path in behind)


def _is_computed_alike(value: Ref, path: str, graph: Graph, root: nn.Module) -> bool:
    """Whether what is computed from a parameter, as a clamped one, stays the same if that is given it."""
    if path not in paths_behind(graph, value):
        return False
    once = parameter(value, graph, root)
    assert once is not None
    if once.shape != attribute(root, path).shape:
        return False  # a part of it: the forward may read the others
    try:
        twice = parameter(value, graph, root, {Attr(path): once})
    except (RuntimeError, IndexError):  # it has another shape, which the calls do not take
        return False
    assert twice is not None
    return twice.shape == once.shape and not bool((twice - once).norm() > SAME * once.norm())
