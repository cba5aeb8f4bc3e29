"""Shapes with symbols: finds which sizes of a captured graph depend on the call, by recordings with other sizes."""

from __future__ import annotations

from quant.graph import Graph, Kind, Node
from quant.runtime.values import Shape, Size

Seen = tuple[int, ...]
"""One size in each recording, in their order."""


class SymbolicShapes:
    """The shapes of a graph's values.

    A size that is the same in all recordings is a number. A varying size of an input is a symbol; any other is a
    multiple of such a symbol, a symbol plus a constant, or a symbol of its own. With few recordings two different sizes
    may get the same symbol.

    Attributes:
        sizes: symbol -> its size at capture.
    """

    def __init__(self, graph: Graph) -> None:
        self.sizes: dict[str, int] = {}
        self._known: dict[Seen, Size] = {}
        self._of_inputs: dict[Seen, Size] = {}
        self._shapes: dict[int, Shape] = {}
        inputs = [node for node in graph.nodes if node.kind is Kind.INPUT]
        for node in inputs:
            self._add(node)
        self._of_inputs = dict(self._known)
        for node in graph.nodes:
            self._add(node)

    def shape(self, node: int) -> Shape | None:
        """The shape of a value of the graph; None where it is not a tensor."""
        return self._shapes.get(node)

    def _add(self, node: Node) -> None:
        if node.meta is not None:
            seen = zip(node.meta.shape, *node.other_shapes, strict=True)
            self._shapes[node.index] = tuple(map(self._size, seen))

    def _size(self, seen: Seen) -> int | Size:
        if len(set(seen)) == 1:
            return seen[0]
        if seen not in self._known:
            self._known[seen] = self._derived(seen) or self._new(seen)
        return self._known[seen]

    def _derived(self, seen: Seen) -> Size | None:
        """A size as the smallest multiple of an input's, or else with the smallest offset."""
        multiples, offsets = [], []
        for base, symbol in self._of_inputs.items():
            factors = {size // one if one and size % one == 0 else 0 for size, one in zip(seen, base, strict=True)}
            distances = {size - one for size, one in zip(seen, base, strict=True)}
            if len(factors) == 1 and 0 not in factors:
                multiples.append(Size(symbol.symbol, factor=factors.pop()))
            if len(distances) == 1:
                offsets.append(Size(symbol.symbol, offset=distances.pop()))
        if multiples:
            return min(multiples, key=lambda size: size.factor)
        return min(offsets, key=lambda size: abs(size.offset), default=None)

    def _new(self, seen: Seen) -> Size:
        name = f"s{len(self.sizes)}" if self.sizes else "n"
        self.sizes[name] = seen[0]
        return Size(name)
