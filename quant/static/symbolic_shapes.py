"""Shapes with symbols: which sizes of a captured graph follow from the call, as its recordings on other sizes show."""

from __future__ import annotations

from quant.graph import Graph, Kind, Node
from quant.runtime.values import Shape, Size

Seen = tuple[int, ...]
"""One size in every recording, the first one's first."""


class SymbolicShapes:
    """The shapes of a graph's values.

    A size that was the same in all recordings is a number. One of an input is a symbol; another is a multiple of such a
    symbol, or off it by a constant, or a symbol of its own. With few recordings two sizes may be taken for one.

    Attributes:
        sizes: of each symbol the number that it was when the graph was captured.
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
        """Of a value of the graph; None where it is no tensor."""
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
        """What a size is in terms of an input's: the smallest multiple, or the nearest offset."""
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
