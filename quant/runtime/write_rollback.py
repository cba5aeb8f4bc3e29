"""What a program wrote before it found out that it does not stand for a call: taken back, for another one runs then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.graph import Graph, Kind
from quant.runtime.matching import CaptureMismatch
from quant.runtime.names import attribute
from quant.runtime.trees import Attr, Ref

Written = tuple[Attr | Ref, ...]
"""Buffers and inputs."""


def written_before_guards(graph: Graph) -> Written:
    """The buffers and inputs that a graph writes to before its last guard."""
    last = max((node.index for node in graph.nodes if node.kind is Kind.GUARD), default=0)
    found = [_origin(graph, node.args[0]) for node in graph.nodes[:last] if node.writes and node.args]
    return tuple(dict.fromkeys(one for one in found if one is not None))


def _origin(graph: Graph, source: Any) -> Attr | Ref | None:
    """Whose memory a written tensor is: the buffer or the input that it is a view of."""
    while isinstance(source, Ref) and graph.nodes[source.index].kind is not Kind.INPUT:
        node = graph.nodes[source.index]
        source = node.args[0] if node.args else None
    return source if isinstance(source, (Attr, Ref)) else None


def undone_at_mismatch(written: Written, root: nn.Module, values: Mapping[int, Any], run: Callable[[], Any]) -> Any:
    """What `run` gives; where it raises CaptureMismatch, nothing is written.

    Args:
        values: the inputs, by the nodes that stand for them.
    """
    tensors = [attribute(root, one.path) if isinstance(one, Attr) else values[one.index] for one in written]
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors if isinstance(tensor, Tensor)]
    try:
        return run()
    except CaptureMismatch:
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)
        raise
