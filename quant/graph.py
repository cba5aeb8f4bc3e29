"""The captured graph: what a model computed, call by call, in plain data that every later phase reads.

Prepare puts observers on its values, convert rewrites it into integers, compare lines two of them up. Nothing here
looks at layers or numbers; `capture.py` makes graphs and `fusion/` reads meaning into them.
"""

from __future__ import annotations

import enum
import functools
import importlib
import sys
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.runtime.expected_call import ExpectedCall, ExpectedInput
from quant.runtime.matching import check_guard, check_tensor
from quant.runtime.names import attribute, full_name, submodule
from quant.runtime.trees import Attr, Ref, leaves, map_leaves, settle


class Kind(enum.Enum):
    """What a node does with its target; the values are for texts."""

    INPUT = "input"
    """Takes an argument; target is where it came from, for people."""
    MODULE = "module"
    """Calls the submodule that target names."""
    FUNCTION = "function"
    """Calls target."""
    METHOD = "method"
    """Calls the method that target names on args[0]."""
    GUARD = "guard"
    """Checks that args[0] equals args[1]."""


@dataclass(frozen=True)
class TensorMeta:
    """What a tensor looked like when the graph was captured."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.layout = torch.strided


@dataclass(frozen=True)
class _Named:
    """A function by its module and name."""

    module: str
    name: str


@dataclass
class Node:
    """One call.

    Attributes:
        index: its place in the graph, and the name of its value.
        kind, target: what it does, and with what (`Kind`).
        args, kwargs: nested tuples, lists, dicts and slices of Ref, Attr and constants.
        owner: dotted name of the innermost module whose forward made the call; its train/eval mode counts.
        site: how many calls of the same module came before in this graph.
        meta: of the value, None where it is no tensor.
        other_shapes: of the value, in recordings of the same calls on other sizes.
        frozen: whether it has `training=False` in training mode too.
        writes: whether it changes an argument of the graph or a buffer of the module, and so is needed for that.
        number: of an input that is no tensor, int or float.
    """

    index: int
    kind: Kind
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    owner: str = ""
    site: int = 0
    meta: TensorMeta | None = None
    writes: bool = False
    frozen: bool = False
    number: type | None = None
    other_shapes: tuple[tuple[int, ...], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # Some functions of torch.nn.functional (max_pool2d) are defined inside another one, and pickle refuses them.
        module, name = getattr(self.target, "__module__", None), getattr(self.target, "__name__", None)
        if (
            self.kind is Kind.FUNCTION
            and module
            and name
            and getattr(sys.modules.get(module), name, None) is self.target
        ):
            return {**self.__dict__, "target": _Named(module, name)}
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.target, _Named):
            self.target = getattr(importlib.import_module(self.target.module), self.target.name)

    def note_other_shape(self, other: Node) -> None:
        """Keep the shape that the same call's value has in another recording."""
        if self.meta is not None:
            like = other.meta is not None and len(other.meta.shape) == len(self.meta.shape)
            self.other_shapes += (other.meta.shape if other.meta is not None and like else self.meta.shape,)

    @property
    def refs(self) -> list[int]:
        """Indices of the values it reads, in order, repeated as often as they are read."""
        return [leaf.index for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Ref)]

    @property
    def label(self) -> str:
        """A name for people and reports: the module's own, or the owner's and what was called there."""
        if self.kind is Kind.MODULE:
            name = self.target or "(root)"
            return f"{name}@{self.site}" if self.site else name
        what = self.target if isinstance(self.target, str) else getattr(self.target, "__name__", str(self.target))
        return full_name(self.owner, f"{what.strip('_')}_{self.index}")


@dataclass
class Span:
    """One call of a submodule that was seen through: nodes[start:end], with what went in and came out.

    Attributes:
        path: the submodule's dotted name.
        arguments: bound to its forward's signature; nested, with Ref.
        output: nested, with Ref.
        has_hooks: whether it was recorded with forward hooks of the user's; files do not hold it.
    """

    path: str
    start: int
    end: int
    arguments: dict[str, Any]
    output: Any
    has_hooks: bool = False


@dataclass
class Graph:
    """What one module computes, from its bound arguments to its output.

    Invariants: nodes[i].index == i, and every Ref points backwards; spans nest or are disjoint.

    Attributes:
        path: dotted name of the captured module in the user's model, '' for the model itself.
        arguments: bound to forward's signature; Ref where a tensor goes in, else the value seen at capture.
        output: nested, with Ref; a `Result` where objects are to be built or something is to be written.
        typed: whether the forward asked for dtypes, so that its inputs must have those of the captured ones.
        ranked: whether it read the sizes of a tensor, so that its inputs must have the captured numbers of dimensions.
        contiguous: whether it writes in place to what is shared where inputs are contiguous, as the captured ones.
    """

    path: str
    nodes: list[Node]
    arguments: dict[str, Any]
    output: Any
    spans: list[Span]
    typed: bool = False
    ranked: bool = False
    contiguous: bool = False

    @functools.cached_property
    def writes(self) -> bool:
        """Whether it changes tensors that outlive a run: arguments, or buffers of the module."""
        return any(node.writes for node in self.nodes)

    def users(self) -> dict[int, list[int]]:
        """For each value the nodes that read it, in order; the output reads as node len(nodes)."""
        users: dict[int, list[int]] = {node.index: [] for node in self.nodes}
        for node in self.nodes:
            for ref in node.refs:
                users[ref].append(node.index)
        for leaf in leaves(self.output):
            if isinstance(leaf, Ref):
                users[leaf.index].append(len(self.nodes))
        return users


def evaluate(node: Node, root: nn.Module, value: Callable[[int], Any]) -> Any:
    """The value of one node that is no input, in the user's own arithmetic.

    Args:
        root: the captured module, of which paths speak.
        value: gives the value of a node by its index.
    """
    result = call(node, root, *arguments_of(node, root, value))
    known = node.kind is Kind.MODULE and node.meta is not None
    return check_tensor(result, node.target, root, node.index) if known else result


def call(node: Node, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a node calls, with these arguments in place of its own; `kwargs` may be changed."""
    if kwargs.get("training") is False and not node.frozen:
        # Captured in eval mode from `training=self.training`: functional dropout follows the mode of its owner.
        kwargs["training"] = attribute(root, node.owner).training
    if node.kind is Kind.FUNCTION:
        return node.target(*args, **kwargs)
    if node.kind is Kind.METHOD:
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    if node.kind is Kind.MODULE:
        return call_module(root, node.target, args, kwargs)
    if node.kind is Kind.GUARD:
        return check_guard(args[0], args[1], node.owner, root, node.index)
    raise AssertionError(f"{node.kind.value} node {node.index} has no value of its own")


def arguments_of(node: Node, root: nn.Module, value: Callable[[int], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's args and kwargs with values in place of references."""
    if len(node.args) == 1 and type(node.args[0]) is Ref and not node.kwargs:
        only = value(node.args[0].index)
        if isinstance(only, Tensor):  # nearly every call of a layer, and no tree to go through
            return (only,), {}

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return value(leaf.index)
        return attribute(root, leaf.path) if isinstance(leaf, Attr) else leaf

    args, kwargs = map_leaves(real, node.args), map_leaves(real, node.kwargs)
    return (settle(args, {}), settle(kwargs, {})) if node.kind is Kind.MODULE else (args, kwargs)


def call_module(root: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a submodule as its parent would, or, for root itself, its class's forward (root's own is the graph)."""
    if path:
        return submodule(root, path)(*args, **kwargs)
    return type(root).forward(root, *args, **kwargs)


def expected_call(graph: Graph, quantized: Container[int] = (), *, ranked: bool = False) -> ExpectedCall:
    """The calls that a graph stands for, by its nodes.

    Args:
        quantized: values that become integers, which only float32 does.
        ranked: whether these are right for the captured numbers of dimensions alone.
    """
    nodes = [node for node in graph.nodes if node.kind is Kind.INPUT]
    inputs = {
        node.index: expected_input(graph, node.index, str(node.target), quantized, ranked=ranked) for node in nodes
    }
    return ExpectedCall(graph.path, graph.arguments, inputs, graph.writes, _written_before_guards(graph))


def expected_input(graph: Graph, value: int, name: str, quantized: Container[int], *, ranked: bool) -> ExpectedInput:
    """What is expected where a value of the graph goes in, in place of the node that gives it."""
    node = graph.nodes[value]
    if node.meta is None:
        return ExpectedInput(name, Tensor if node.number is None else node.number)
    dtype = node.meta.dtype if graph.typed or value in quantized else None
    rank = len(node.meta.shape) if graph.ranked or ranked else None
    return ExpectedInput(name, Tensor, dtype, rank, graph.contiguous)


def _written_before_guards(graph: Graph) -> tuple[Attr | Ref, ...]:
    """The buffers and inputs that a graph writes to before its last guard."""
    last = max((node.index for node in graph.nodes if node.kind is Kind.GUARD), default=0)
    written = [one for node in graph.nodes[:last] if node.writes for one in written_arguments(node)]
    origins = [written_origin(graph, one) for one in written]
    return tuple(dict.fromkeys(one for one in origins if one is not None))


def written_arguments(node: Node) -> tuple[Any, ...]:
    """The arguments that a call with `writes` changes: the first, and of F.batch_norm its running statistics."""
    if node.target is F.batch_norm:
        places = ((1, "running_mean"), (2, "running_var"))
        given = (node.args[place] if place < len(node.args) else node.kwargs.get(name) for place, name in places)
        return tuple(one for one in given if one is not None)
    return node.args[:1]


def written_origin(graph: Graph, source: Any) -> Attr | Ref | None:
    """Whose memory a written tensor is: the buffer or the input that it is a view of."""
    while isinstance(source, Ref) and graph.nodes[source.index].kind is not Kind.INPUT:
        node = graph.nodes[source.index]
        source = node.args[0] if node.args else None
    return source if isinstance(source, (Attr, Ref)) else None
