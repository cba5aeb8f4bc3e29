"""Which branches on a tensor's values a guard can hold: those that the caller's masks, indices and sizes alone decide.

A forward asks of a mask whether it is full, and of indices whether a padding is among them. Most calls give the same
answer, and to ask costs little beside the layers that follow. What activations say may differ in every call, and is
known when most of the work is done: a module that branches on these is an island. So is one that is not called by the
user and branches on integers, which may be made of activations, such as the experts that a router chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quant.capture.calls import RANDOM, SIZES, called
from quant.graph import Kind, Node, TensorMeta
from quant.runtime.trees import Ref, leaves


def decided_by_flags(nodes: Sequence[Node], places: Any) -> bool:
    """Whether all that nested places name follows from integers and booleans of the caller's, sizes and buffers."""
    waiting = [leaf.index for leaf in leaves(places) if isinstance(leaf, Ref)]
    seen = set(waiting)
    while waiting:
        node = nodes[waiting.pop()]
        if node.kind is Kind.INPUT:
            if _is_real(node.meta):
                return False
            continue
        function = called(node)
        if node.kind not in (Kind.FUNCTION, Kind.METHOD, Kind.GUARD) or function in RANDOM:
            return False
        if function not in SIZES:
            waiting += [ref for ref in node.refs if ref not in seen]
            seen.update(node.refs)
    return True


def _is_real(meta: TensorMeta | None) -> bool:
    return meta is not None and (meta.dtype.is_floating_point or meta.dtype.is_complex)
