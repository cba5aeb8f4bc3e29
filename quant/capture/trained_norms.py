"""Differences between recordings in training and eval mode that training can handle.

Dropout and batch norms get `training=self.training`. A subclass of a batch norm that calls `F.batch_norm` itself
(timm's `BatchNormAct2d`) passes other settings in training mode too, and counts the batches; `FunctionalNorm` does the
same, and stands for it in training.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from quant.capture.calls import called, functions
from quant.capture.recorder import Recorder
from quant.dead_calls import keep_only, needed_places
from quant.folding import NORM_ARGUMENTS, FunctionalNorm, is_own_norm, norm_arguments
from quant.graph import Graph, Kind, Node
from quant.runtime.names import full_name
from quant.runtime.trees import Attr, Ref, leaves

READS = functions("__float__", "item")
"""Calls that turn a tensor into a Python number."""


def graph_of(recorder: Recorder) -> Graph:
    """The graph with all recorded calls; `Recorder.graph` drops those that are not needed."""
    return Graph(recorder.path, recorder.nodes, {}, recorder.output, recorder.spans)


def settle_mode(one: Recorder, other: Recorder) -> None:
    """Give `other`, recorded in training mode, the eval-mode settings of `one` where training handles the difference.

    Calls with `training=False` in both are marked as frozen.
    """
    _settle_norms(one, other)
    eval_graph = graph_of(one)
    for place, twin_place in zip(needed_places(eval_graph), needed_places(graph_of(other)), strict=False):
        node, counterpart = one.nodes[place], other.nodes[twin_place]
        if node.kwargs.get("training") is not False or is_own_norm(node, eval_graph):
            continue
        if counterpart.kwargs.get("training") is True:
            counterpart.kwargs["training"] = False
        else:
            node.frozen = True


def _settle_norms(one: Recorder, other: Recorder) -> None:
    graph = graph_of(one)
    calls, others = _norm_calls(one), _norm_calls(other)
    counts: set[int] = set()
    for owner, own_calls in calls.items():
        counted = _counted(other, owner)
        pairs = zip(own_calls, others.get(owner, []), strict=False)
        own = [(call, counterpart) for call, counterpart in pairs if is_own_norm(call, graph)]
        alike = [
            _settle_norm(FunctionalNorm(call, graph, one.root), call, counterpart, batch, is_counted=bool(counted))
            for batch, (call, counterpart) in enumerate(own, start=1)
        ]
        if all(alike) and len(counted) == len(own):
            counts |= counted
            if counted and one.root.get_submodule(owner).momentum is None:
                counts |= _reads(other, counted)
    _leave_out(other, counts)


def _norm_calls(recorder: Recorder) -> dict[str, list[Node]]:
    """Module -> its needed calls of F.batch_norm, in order."""
    calls: dict[str, list[Node]] = {}
    for place in needed_places(graph_of(recorder)):
        node = recorder.nodes[place]
        if node.target is F.batch_norm:
            calls.setdefault(node.owner, []).append(node)
    return calls


def _settle_norm(norm: FunctionalNorm, call: Node, counterpart: Node, batch: int, *, is_counted: bool) -> bool:
    """Give a call in training mode the settings of the one in eval mode, if it is the call that `norm` would make.

    Args:
        batch: the number of the call among those of its module, from 1.
    """
    before, arguments = norm_arguments(call), norm_arguments(counterpart)
    if not arguments.get("training"):
        call.frozen = True
        return False
    if norm.is_frozen:
        return False
    same = ["training", "momentum"]
    if not norm.track_running_stats:
        same += ["running_mean", "running_var"]
        if any(arguments[name] is not None for name in same[2:]):
            return False
    else:
        share = norm.share(int(norm.num_batches_tracked) + batch)
        if arguments["momentum"] != share or (norm.momentum is None and not is_counted):
            return False
    changes = {name: before[name] for name in same}
    counterpart.args = tuple(
        changes.get(name, value) for name, value in zip(NORM_ARGUMENTS, counterpart.args, strict=False)
    )
    counterpart.kwargs = {name: changes.get(name, value) for name, value in counterpart.kwargs.items()}
    return True


def _counted(recorder: Recorder, owner: str) -> set[int]:
    """The calls `num_batches_tracked.add_(1)` of a batch norm."""
    if not isinstance(recorder.root.get_submodule(owner), nn.modules.batchnorm._BatchNorm):
        return set()
    counter = Attr(full_name(owner, "num_batches_tracked"))
    counted: set[int] = set()
    for node in recorder.nodes:
        if called(node) is Tensor.add_ and node.owner == owner and node.args[1:] == (1,) and not node.kwargs:
            source = node.args[0]
            if source == counter or (isinstance(source, Ref) and source.index in counted):
                counted.add(node.index)
    return counted


def _reads(recorder: Recorder, counted: set[int]) -> set[int]:
    """The calls that turn batch counts into Python numbers, for an average over all batches, and their guards."""
    reading: set[int] = set()
    for node in recorder.nodes:
        reads = node.kind is Kind.GUARD or called(node) in READS
        if reads and node.refs and (counted | reading).issuperset(node.refs):
            reading.add(node.index)
    return reading


def _leave_out(recorder: Recorder, gone: set[int]) -> None:
    """Remove the counting of batches from a recording; a count used for something else stays and is a difference."""
    rest = [(node.args, node.kwargs) for node in recorder.nodes if node.index not in gone]
    spans = [(span.arguments, span.output) for span in recorder.spans]
    read = {leaf.index for leaf in leaves([rest, spans, recorder.output]) if isinstance(leaf, Ref)}
    if not gone or not gone.isdisjoint(read):
        return
    kept = keep_only(graph_of(recorder), {node.index for node in recorder.nodes} - gone)
    recorder.nodes, recorder.output = kept.nodes, kept.output
