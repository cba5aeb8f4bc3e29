"""The captured graph: what a model computed, call by call, in plain data that every later phase reads.

Prepare puts observers on its values, convert rewrites it into integers, compare lines two of them up. Nothing here
looks at layers or numbers; `capture.py` makes graphs and `fusion/` reads meaning into them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quant.names import full_name
from quant.objects import (
    OPAQUE,
    Given,
    Instance,
    Result,
    Write,
    at,
    attributes_of,
    built,
    compares_itself,
    fill,
    has_own_form,
    items_of,
)

Kind: TypeAlias = Literal["input", "module", "function", "method", "guard"]


class CaptureMismatch(RuntimeError):
    """A call that the captured graph does not stand for: other arguments, or a branch taken otherwise.

    Attributes:
        place: the node at which it was found out; the nodes before it have run.
    """

    def __init__(self, message: str, place: int = 0) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True)
class Ref:
    """The value of node `index` of the same graph."""

    index: int


@dataclass(frozen=True)
class Attr:
    """A parameter or buffer of the captured module, by its dotted name; read anew at every run."""

    path: str


class PackedParts(NamedTuple):
    """A PackedSequence whose parts are references; torch's own class looks into its parts whenever one is made."""

    data: Any
    batch_sizes: Any
    sorted_indices: Any
    unsorted_indices: Any


class Sizes(tuple[Any, ...]):
    """A torch.Size whose numbers are references; torch's own class takes none."""


@dataclass(frozen=True)
class TensorMeta:
    """What a tensor looked like when the graph was captured."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.layout = torch.strided


@dataclass(frozen=True)
class _Named:
    """A function by where it is found."""

    module: str
    name: str


@dataclass
class Node:
    """One call.

    Attributes:
        index: its place in the graph, and the name of its value.
        kind: "input" takes an argument; "module" calls the submodule named by target; "function" calls target;
            "method" calls the method named by target on args[0]; "guard" checks that args[0] equals args[1].
        target: see kind; for an input, where it came from, for people.
        args, kwargs: nested tuples, lists, dicts and slices of Ref, Attr and constants.
        owner: dotted name of the innermost module whose forward made the call; its train/eval mode counts.
        site: how many calls of the same module came before in this graph.
        meta: of the value, None where it is no tensor.
        other_shapes: of the value, in recordings of the same calls on other sizes.
        frozen: whether it is told `training=False` in training mode too.
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
        # Some functions of torch.nn.functional (max_pool2d) were made inside another function, and pickle refuses them.
        module, name = getattr(self.target, "__module__", None), getattr(self.target, "__name__", None)
        if self.kind == "function" and module and name and getattr(sys.modules.get(module), name, None) is self.target:
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
        if self.kind == "module":
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
    """

    path: str
    start: int
    end: int
    arguments: dict[str, Any]
    output: Any


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


_LEAVES = frozenset({Ref, Attr, Given, Tensor, type(None), bool, int, float, str})
"""Asked first: what nearly all leaves are."""


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with fn applied to all that is no container; tuples (named too), lists, dicts, slices, dataclasses are."""
    kind = type(tree)
    if kind in _LEAVES:
        return fn(tree)
    if kind is tuple:
        return tuple([map_leaves(fn, item) for item in tree])
    if kind is dict:
        return {key: map_leaves(fn, value) for key, value in tree.items()}
    if kind in (Instance, Result, Write):
        return _map_object(fn, tree)
    if issubclass(kind, (tuple, list)):
        items = [map_leaves(fn, item) for item in tree]
        if kind is torch.Size:
            return torch.Size(items) if all(isinstance(item, int) for item in items) else Sizes(items)
        if kind is Sizes and all(isinstance(item, int) for item in items):
            return torch.Size(items)
        if kind in (PackedSequence, PackedParts):
            return _packed(items)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if kind is slice:
        return slice(*(map_leaves(fn, part) for part in (tree.start, tree.stop, tree.step)))
    if dataclasses.is_dataclass(kind):
        return _map_dataclass(fn, tree)
    if issubclass(kind, Mapping):
        pairs = {key: map_leaves(fn, value) for key, value in tree.items()}
        return pairs if kind is dict else kind(pairs)  # type: ignore[call-arg]
    return fn(tree)


def _map_object(fn: Callable[[Any], Any], tree: Any) -> Any:
    if type(tree) is Instance:
        return Instance(tree.kind, map_leaves(fn, tree.attributes), map_leaves(fn, tree.items))
    if type(tree) is Write:
        return Write(tree.target, map_leaves(fn, tree.value))
    return Result(map_leaves(fn, tree.value), tuple(_map_object(fn, write) for write in tree.writes))


def settled(output: Any, root: nn.Module, arguments: Mapping[str, Any]) -> Any:
    """What the caller gets for an output whose leaves are real: objects built, and everything written.

    Args:
        root: the captured module, whose attributes may be written.
        arguments: of the call, by name.
    """
    if type(output) is not Result:
        return output
    value = settle(output.value, arguments)
    contents = [(write.target, settle(write.value, arguments)) for write in output.writes]
    for target, content in contents:
        if isinstance(target, Given):
            fill(at(arguments, target), *content)
        else:
            owner, _, name = target.rpartition(".")
            setattr(attribute(root, owner), name, content)
    return value


def settle(tree: Any, arguments: Mapping[str, Any]) -> Any:
    """`tree` with objects in place of `Instance` and `Given`."""
    kind = type(tree)
    if kind is Given:
        return at(arguments, tree)
    if kind is Instance:
        attributes, items = settle((tree.attributes, tree.items), arguments)
        return built(Instance(tree.kind, attributes, items))
    if kind in (tuple, list):
        return kind([settle(item, arguments) for item in tree])
    if kind is PackedSequence or kind is slice or isinstance(tree, Tensor) or hasattr(kind, "n_sequence_fields"):
        return tree
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*[settle(item, arguments) for item in tree])
    if has_own_form(kind) and dataclasses.is_dataclass(kind):
        return kind(**{name: settle(getattr(tree, name), arguments) for name in _init_fields(tree)})
    if issubclass(kind, Mapping):
        pairs = {key: settle(value, arguments) for key, value in tree.items()}
        return pairs if kind is dict else kind(pairs)  # type: ignore[call-arg]
    return tree


def _packed(items: list[Any]) -> tuple[Any, ...]:
    real = isinstance(items[0], Tensor)
    return PackedSequence._make(items) if real else PackedParts._make(items)


def _map_dataclass(fn: Callable[[Any], Any], tree: Any) -> Any:
    return type(tree)(**{name: map_leaves(fn, getattr(tree, name)) for name in _init_fields(tree)})


def _init_fields(tree: Any) -> list[str]:
    return [item.name for item in dataclasses.fields(tree) if item.init]


def leaves(tree: Any) -> Iterator[Any]:
    """All that `map_leaves` would visit, in order."""
    found: list[Any] = []
    _collect(tree, found)
    return iter(found)


def _collect(tree: Any, found: list[Any]) -> None:
    """`map_leaves(found.append, tree)`, without another tree for what nearly all arguments are made of."""
    kind = type(tree)
    if kind is tuple or kind is list:
        for item in tree:
            _collect(item, found)
    elif kind is dict:
        for item in tree.values():
            _collect(item, found)
    elif kind in _LEAVES:
        found.append(tree)
    else:
        map_leaves(found.append, tree)


_PLAIN = (type(None), bool, int, float, str)
"""Constants that are equal to themselves; asked first, because most arguments of a call are one."""


def is_plain(value: Any) -> bool:
    """Whether a constant is one of the plain ones, which `match_arguments` takes for equal where they are the same."""
    return isinstance(value, _PLAIN)


def match_arguments(expected: Any, given: Any, where: str, bind: Callable[[int, Any], None]) -> None:
    """Walk the captured arguments beside those of a call, and bind each tensor.

    Args:
        expected: nested, with Ref where a tensor goes in.
        given: of the call, same nesting.
        where: how the arguments are called in an error.
        bind: called with the index of each Ref and the value given for it.

    Raises:
        CaptureMismatch: nesting, type or a constant differs from what was captured.
    """
    if isinstance(expected, Ref):
        bind(expected.index, given)
    elif expected is given and isinstance(expected, _PLAIN):
        return
    elif isinstance(expected, (tuple, list)):
        if not isinstance(given, (tuple, list)) or len(given) != len(expected):
            raise _mismatch(where, f"{type(expected).__name__} of {len(expected)}", given)
        for index, (one, other) in enumerate(zip(expected, given, strict=True)):
            match_arguments(one, other, f"{where}[{index}]", bind)
    elif isinstance(expected, Mapping):
        if not isinstance(given, Mapping) or set(given) != set(expected):
            raise _mismatch(where, f"keys {list(expected)}", given)
        for key in expected:
            match_arguments(expected[key], given[key], f"{where}[{key!r}]", bind)
    elif type(expected) is Instance:
        if type(given) is not expected.kind:
            raise _mismatch(where, expected.kind.__name__, given)
        match_arguments(expected.attributes, attributes_of(given), where, bind)
        match_arguments(expected.items, items_of(given), where, bind)
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        if type(given) is not type(expected):
            raise _mismatch(where, type(expected).__name__, given)
        for item in dataclasses.fields(expected):
            match_arguments(getattr(expected, item.name), getattr(given, item.name), f"{where}.{item.name}", bind)
    elif isinstance(expected, Attr):
        return  # a parameter of the model's own, which the graph reads anew
    elif isinstance(given, Tensor):
        raise _mismatch(where, _shown(expected), given)
    elif not _same(expected, given):
        _match_objects(expected, given, where, bind)


def _match_objects(expected: Any, given: Any, where: str, bind: Callable[[int, Any], None]) -> None:
    """Two objects of a class that does not compare them are alike where all that they hold is."""
    if (
        compares_itself(type(expected))
        or isinstance(expected, OPAQUE)
        or type(expected) is not type(given)
        or where.count(".") > 8
    ):
        raise _mismatch(where, _shown(expected), given)
    one, other = attributes_of(expected), attributes_of(given)
    if not one or set(one) != set(other):
        raise _mismatch(where, _shown(expected), given)
    for name in one:
        match_arguments(one[name], other[name], f"{where}.{name}", bind)


def _shown(expected: Any) -> str:
    return repr(expected) if isinstance(expected, _PLAIN) else f"the same {type(expected).__name__}"


def _same(expected: Any, given: Any) -> bool:
    if expected is given or isinstance(expected, Tensor):
        return expected is given
    try:
        return type(expected) is type(given) and bool(expected == given)
    except Exception:  # a comparison of the user's own class may raise, or give an array
        return False


def _mismatch(where: str, expected: str, given: Any) -> CaptureMismatch:
    return CaptureMismatch(
        f"{where}: expected {expected}, as in example_inputs, got {said(given)}; prepare the model with example_inputs "
        "like this call"
    )


def said(value: Any) -> str:
    """A value as errors call it: in full only where it is short."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def attribute(root: nn.Module, path: str) -> Any:
    """The parameter, buffer or submodule of `root` with this dotted name ('' is root itself)."""
    found: Any = root
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found


def evaluate(node: Node, root: nn.Module, value: Callable[[int], Any]) -> Any:
    """The value of one node that is no input, in the user's own arithmetic.

    Args:
        root: the captured module, of which paths speak.
        value: gives the value of a node by its index.
    """
    return call(node, root, *arguments_of(node, root, value))


def call(node: Node, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a node calls, with these arguments in place of its own; `kwargs` may be changed."""
    if kwargs.get("training") is False and not node.frozen:
        # Captured in eval mode from `training=self.training`: functional dropout follows the mode of its owner.
        kwargs["training"] = attribute(root, node.owner).training
    if node.kind == "function":
        return node.target(*args, **kwargs)
    if node.kind == "method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    if node.kind == "module":
        return call_module(root, node.target, args, kwargs)
    if node.kind == "guard":
        return check_guard(args[0], args[1], node.owner, root, node.index)
    raise AssertionError(f"{node.kind} node {node.index} has no value of its own")


def arguments_of(node: Node, root: nn.Module, value: Callable[[int], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's args and kwargs with values in place of references."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return value(leaf.index)
        return attribute(root, leaf.path) if isinstance(leaf, Attr) else leaf

    args, kwargs = map_leaves(real, node.args), map_leaves(real, node.kwargs)
    return (settle(args, {}), settle(kwargs, {})) if node.kind == "module" else (args, kwargs)


def call_module(root: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a submodule as its parent would, or, for root itself, its class's forward (root's own is the graph)."""
    if path:
        return attribute(root, path)(*args, **kwargs)
    return type(root).forward(root, *args, **kwargs)


def check_guard(given: Any, expected: Any, owner: str, root: nn.Module, place: int) -> Any:
    """The value, if it is what the model's branch was captured with.

    Args:
        owner: dotted name of the module in `root` that decides by it.
        place: the node that it is the value of.
    """
    if given != expected:
        raise CaptureMismatch(
            f"{type(root).__name__}{'.' + owner if owner else ''} decides by a size: it was {expected!r} for "
            f"example_inputs and is {given!r} now, so the captured graph does not stand for this call; prepare the "
            "model with example_inputs of this size",
            place,
        )
    return given
