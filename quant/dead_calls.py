"""Dead code in graphs: calls without readers, which are removed, and values after their last use."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from quant.graph import Graph, Kind
from quant.runtime.trees import Ref, map_leaves


def needed_places(graph: Graph) -> list[int]:
    """The places of the calls to keep: those whose value is read, and all guards, inputs and modules."""
    users = graph.users()
    keep: set[int] = set()
    spans = {leaf.index for span in graph.spans for leaf in _refs((span.arguments, span.output))}
    for node in reversed(graph.nodes):
        needed = any(user == len(graph.nodes) or user in keep for user in users[node.index]) or node.index in spans
        if needed or node.writes or node.kind in (Kind.INPUT, Kind.GUARD, Kind.MODULE):
            keep.add(node.index)
    return sorted(keep)


def remove_dead(graph: Graph) -> Graph:
    """The graph without dead calls."""
    return keep_only(graph, set(needed_places(graph)))


def keep_only(graph: Graph, keep: set[int]) -> Graph:
    """Keep only some of a graph's calls, which read no others; nodes and spans are renumbered in place."""
    order = [node for node in graph.nodes if node.index in keep]
    moved = {node.index: place for place, node in enumerate(order)}

    def renumber(leaf: Any) -> Any:
        return Ref(moved[leaf.index]) if isinstance(leaf, Ref) else leaf

    for node in order:
        node.args, node.kwargs = map_leaves(renumber, (node.args, node.kwargs))
    starts = list(accumulate((node.index in keep for node in graph.nodes), initial=0))
    for span in graph.spans:
        span.start, span.end = starts[span.start], starts[span.end]
        span.arguments, span.output = map_leaves(renumber, (span.arguments, span.output))
    for node in order:
        node.index = moved[node.index]
    arguments, output = map_leaves(renumber, (graph.arguments, graph.output))
    asked = {"typed": graph.typed, "ranked": graph.ranked, "contiguous": graph.contiguous}
    return Graph(graph.path, order, arguments, output, graph.spans, **asked)


def last_uses(graph: Graph) -> dict[int, list[int]]:
    """For each node, the values that have no reader after it and can be dropped."""
    last: dict[int, list[int]] = {}
    for value, readers in graph.users().items():
        place = max(readers, default=value)
        if place < len(graph.nodes):
            last.setdefault(place, []).append(value)
    return last


def _refs(tree: Any) -> list[Ref]:
    refs: list[Ref] = []
    map_leaves(lambda leaf: refs.append(leaf) if isinstance(leaf, Ref) else None, tree)
    return refs
