"""`torch.einsum` of two tensors as the calls that it stands for: permutes, one matrix product, and sizes taken apart.

So that what reads a graph has to know products alone: an einsum with a parameter is a linear layer, one of two
activations a product. It is rewritten after the recording is proved, as the product may round another way than torch's
einsum does where a size is 1.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from quant.folding import depends_on_nothing, has_parameter
from quant.graph import Graph, Kind, Node, TensorMeta, call
from quant.runtime.names import attribute
from quant.runtime.trees import Attr, Ref, map_leaves


@dataclass(frozen=True)
class Contraction:
    """The dimensions of a product of two tensors, a letter each.

    Attributes:
        one, other: of the operands, in order.
        out: of the result, in order.
        batch, rows, columns: of the result: those of both operands, of the first, and of the second.
        summed: of both operands and not of the result; at least one.
    """

    one: str
    other: str
    out: str

    @property
    def batch(self) -> str:
        return "".join(letter for letter in self.out if letter in self.one and letter in self.other)

    @property
    def rows(self) -> str:
        return "".join(letter for letter in self.out if letter not in self.other)

    @property
    def columns(self) -> str:
        return "".join(letter for letter in self.out if letter not in self.one)

    @property
    def summed(self) -> str:
        return "".join(letter for letter in self.one if letter in self.other and letter not in self.out)

    @property
    def swapped(self) -> Contraction:
        return Contraction(self.other, self.one, self.out)


def contraction(equation: Any) -> Contraction | None:
    """What an equation of two operands computes, if a matrix product does; else None."""
    if not isinstance(equation, str):
        return None
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != 2 or not "".join((*operands, out)).isalpha():
        return None
    counts = Counter("".join(operands))
    found = Contraction(
        operands[0], operands[1], out if arrow else "".join(sorted(one for one in counts if counts[one] == 1))
    )
    once = all(len(set(term)) == len(term) for term in (found.one, found.other, found.out))
    used = set(found.out) | set(found.summed)
    if not once or used != set(counts) or not (found.summed and found.rows and found.columns):
        return None
    return found


def as_products(graph: Graph, root: nn.Module) -> Graph:
    """The graph with a matrix product in place of each `torch.einsum` that is one; nodes are renumbered in place.

    Args:
        root: the module that the graph is of.
    """
    if not any(node.target is torch.einsum for node in graph.nodes):
        return graph
    nodes: list[Node] = []
    moved: dict[int, int] = {}

    def renumber(leaf: Any) -> Any:
        return Ref(moved[leaf.index]) if isinstance(leaf, Ref) else leaf

    products = [_Product.of(node, graph, root) for node in graph.nodes]  # while all have their first numbers
    counts = []
    for node, written in zip(graph.nodes, products, strict=True):
        node.args, node.kwargs = map_leaves(renumber, (node.args, node.kwargs))
        steps = [node] if written is None else written.steps(node, nodes, root)
        counts.append(len(steps))
        moved[node.index] = len(nodes) + len(steps) - 1
        nodes += steps
    starts = list(accumulate(counts, initial=0))
    for span in graph.spans:
        span.start, span.end = starts[span.start], starts[span.end]
        span.arguments, span.output = map_leaves(renumber, (span.arguments, span.output))
    for index, node in enumerate(nodes):
        node.index = index
    graph.arguments, graph.output = map_leaves(renumber, (graph.arguments, graph.output))
    return dataclasses.replace(graph, nodes=nodes)


@dataclass(frozen=True)
class _Product:
    """An einsum that is a matrix product.

    Attributes:
        dims: those of its operands.
        swaps: whether its second operand is the product's first, as where a weight comes first.
        weighs: whether the product's second operand is a weight, of which the sizes are constants.
    """

    dims: Contraction
    swaps: bool
    weighs: bool

    @classmethod
    def of(cls, node: Node, graph: Graph, root: nn.Module) -> _Product | None:
        """The product that a node of a graph is; None where it is none."""
        if node.target is not torch.einsum or node.kwargs:
            return None
        dims, operands = contraction(node.args[0]), _operands(node)
        if dims is None or len(operands) != 2 or not all(_is_float32(one, graph, root) for one in operands):
            return None
        for one, other in zip(*(_shapes(operand, graph.nodes, root, node) for operand in operands), strict=True):
            if len(one) != len(dims.one) or len(other) != len(dims.other):
                return None
            sizes = dict(zip(dims.one, one, strict=True))
            if any(sizes.get(letter, size) != size for letter, size in zip(dims.other, other, strict=True)):
                return None  # one size of 1 stands for several, which no product does
        constants = [operand for operand in operands if depends_on_nothing(graph, operand)]
        if constants and (dims.batch or not has_parameter(graph, root, constants[0])):
            return None  # no layer, and a product of integers is one of activations
        swaps = constants == [operands[0]]
        return cls(dims.swapped if swaps else dims, swaps, bool(constants))

    def steps(self, node: Node, before: list[Node], root: nn.Module) -> list[Node]:
        """The calls, of which the last gives what the node gave.

        Args:
            node: reads `before` by its new numbers.
        """
        dims, batch = self.dims, len(self.dims.batch)
        one, other = _operands(node)[::-1] if self.swaps else _operands(node)
        chain = _Chain(node, before, root, other if self.weighs else None)
        if len(dims.summed) > 1:  # 3 by 2 has as many values as 2 by 3, which an einsum refuses
            for letter in dims.summed:
                chain.hold_equal(one, dims.one.index(letter), other, dims.other.index(letter))
        rows = chain.permuted(one, dims.one, dims.batch + dims.rows + dims.summed)
        rows = chain.flattened(rows, -len(dims.summed), len(dims.summed))
        columns = chain.permuted(other, dims.other, dims.batch + dims.summed + dims.columns)
        columns = chain.flattened(columns, -len(dims.columns), len(dims.columns))
        columns = chain.flattened(columns, batch, len(dims.summed))
        apart = len(dims.rows) if batch else 1  # without a batch a product has any number of rows' dimensions
        rows = chain.flattened(rows, batch, apart)
        y = chain.append(Kind.FUNCTION, torch.matmul, rows, columns)
        y = chain.unflattened(y, -1, other, [dims.other.index(letter) for letter in dims.columns])
        if apart > 1:
            y = chain.unflattened(y, batch, one, [dims.one.index(letter) for letter in dims.rows])
        chain.permuted(y, dims.batch + dims.rows + dims.columns, dims.out)
        return chain.laid_out()


class _Chain:
    """Calls in place of a node, with the shapes of their values in all recordings.

    Attributes:
        weight: a value that follows from parameters alone, or None.
        nodes: the calls so far.
    """

    def __init__(self, node: Node, before: list[Node], root: nn.Module, weight: Any) -> None:
        self.node, self.before, self.root, self.weight = node, before, root, weight
        self.nodes: list[Node] = []

    def append(self, kind: Kind, target: Any, *args: Any) -> Ref:
        """Add a call; its value."""
        place = len(self.before) + len(self.nodes)
        new = Node(place, kind, target, args, owner=self.node.owner)
        shapes = [self._value(new, recording) for recording in range(1 + len(self.node.other_shapes))]
        if isinstance(shapes[0], Tensor):
            new.meta = TensorMeta(tuple(shapes[0].shape), shapes[0].dtype)
            new.other_shapes = tuple(tuple(one.shape) for one in shapes[1:])
        self.nodes.append(new)
        return Ref(place)

    def permuted(self, value: Any, have: str, want: str) -> Any:
        return value if have == want else self.append(Kind.METHOD, "permute", value, *map(have.index, want))

    def flattened(self, value: Any, first: int, count: int) -> Any:
        return value if count == 1 else self.append(Kind.METHOD, "flatten", value, first, first + count - 1)

    def unflattened(self, value: Any, dim: int, like: Any, dims: list[int]) -> Any:
        """A dimension taken apart into such as `dims` of `like`."""
        if len(dims) == 1:
            return value
        sizes = tuple(self.size(like, one) for one in dims)
        return self.append(Kind.METHOD, "unflatten", value, dim, sizes)

    def hold_equal(self, one: Any, dim: int, other: Any, other_dim: int) -> None:
        """Guard that a size is that of another value."""
        size, expected = self.size(one, dim), self.size(other, other_dim)
        if isinstance(expected, Ref):
            size, expected = self.append(Kind.FUNCTION, operator.eq, size, expected), True
        self.append(Kind.GUARD, "guard", size, expected)

    def laid_out(self) -> list[Node]:
        """The calls, with a last one where einsum's result lies otherwise in memory: `view` takes what it gives."""
        last = self.nodes[-1]
        if self._value(last, 0).stride() != self._value(self.node, 0).stride():
            self.append(Kind.METHOD, "contiguous", Ref(last.index))
        return self.nodes

    def size(self, value: Any, dim: int) -> Any:
        """A size as a number of the graph; of a weight the number itself."""
        if isinstance(value, Ref) and value != self.weight:
            return self.append(Kind.METHOD, "size", value, dim)
        return _shapes(value, self.before, self.root, self.node)[0][dim]

    def _value(self, node: Node, recording: int) -> Any:
        """What a call gives in one of the recordings, without its values."""

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, (Ref, Attr)):
                return leaf
            if isinstance(leaf, Ref) and self._at(leaf.index).meta is None:
                return self._value(self._at(leaf.index), recording)
            shape = _shapes(leaf, [*self.before, *self.nodes], self.root, self.node)[recording]
            return torch.empty(shape, device="meta")

        return call(node, self.root, map_leaves(real, node.args), {})

    def _at(self, index: int) -> Node:
        return self.before[index] if index < len(self.before) else self.nodes[index - len(self.before)]


def _operands(node: Node) -> tuple[Any, ...]:
    """The tensors of an einsum, which may be given as one list."""
    args = node.args[1:]
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args


def _constant(value: Any, root: nn.Module) -> Tensor:
    tensor: Tensor = attribute(root, value.path) if isinstance(value, Attr) else value
    return tensor


def _is_float32(value: Any, graph: Graph, root: nn.Module) -> bool:
    if isinstance(value, Ref):
        meta = graph.nodes[value.index].meta
        return meta is not None and meta.dtype == torch.float32 and meta.layout == torch.strided
    tensor = _constant(value, root)
    return isinstance(tensor, Tensor) and tensor.dtype == torch.float32 and tensor.layout == torch.strided


def _shapes(value: Any, nodes: list[Node], root: nn.Module, like: Node) -> list[tuple[int, ...]]:
    """The shapes of a value in the recording and the others, of which `like` knows how many there are."""
    if not isinstance(value, Ref):
        return [tuple(_constant(value, root).shape)] * (1 + len(like.other_shapes))
    node = nodes[value.index]
    assert node.meta is not None
    return [node.meta.shape, *node.other_shapes]
