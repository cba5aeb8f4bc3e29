"""Nested arguments and outputs of graphs and programs, with places for the values of a call.

A place is a `Ref` to a value, an `Attr` of the module, or an object of the caller's (`objects.Given`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quant.runtime.names import attribute, set_attribute
from quant.runtime.objects import Given, Instance, Result, Write, at, built, fill, has_own_form


@dataclass(frozen=True)
class Ref:
    """The value of node `index` of the same graph."""

    index: int


@dataclass(frozen=True)
class Attr:
    """A parameter or buffer of the captured module, by its dotted name; read anew at every run."""

    path: str


class PackedParts(NamedTuple):
    """A PackedSequence whose parts are references; the constructor of torch's class reads its parts."""

    data: Any
    batch_sizes: Any
    sorted_indices: Any
    unsorted_indices: Any


class Sizes(tuple[Any, ...]):
    """A torch.Size whose numbers are references, which torch's class does not take."""


_LEAVES = frozenset({Ref, Attr, Given, Tensor, type(None), bool, int, float, str, torch.dtype, type(...)})
"""The classes of most leaves, checked first for speed."""


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `fn` applied to its leaves: all but tuples, named tuples, lists, mappings, slices and dataclasses."""
    kind = type(tree)
    if kind in _LEAVES:
        return fn(tree)
    if kind is tuple:
        return tuple([map_leaves(fn, item) for item in tree])
    if kind is dict:
        return {key: map_leaves(fn, value) for key, value in tree.items()}
    if kind is slice:
        return slice(map_leaves(fn, tree.start), map_leaves(fn, tree.stop), map_leaves(fn, tree.step))
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
    """Build the objects of an output and apply its writes; returns what the caller gets.

    Args:
        output: nested, with real values at its leaves.
        root: the captured module, whose attributes may be written.
        arguments: those of the call, by name.
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
            set_attribute(attribute(root, owner), name, content)
    return value


def settle(tree: Any, arguments: Mapping[str, Any]) -> Any:
    """`tree` with objects in the place of `Instance` and `Given`."""
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
    """The leaves of a tree, in order."""
    collected: list[Any] = []
    _collect(tree, collected)
    return iter(collected)


def _collect(tree: Any, collected: list[Any]) -> None:
    """`map_leaves(collected.append, tree)`, which builds no second tree for the most frequent containers."""
    kind = type(tree)
    if kind is tuple or kind is list:
        for item in tree:
            _collect(item, collected)
    elif kind is dict:
        for item in tree.values():
            _collect(item, collected)
    elif kind in _LEAVES:
        collected.append(tree)
    elif kind is slice:
        for item in (tree.start, tree.stop, tree.step):
            _collect(item, collected)
    else:
        map_leaves(collected.append, tree)


PLAIN = (type(None), bool, int, float, str)
"""Classes of the most frequent constants, checked first for speed."""


def is_plain(value: Any) -> bool:
    """Whether a constant is of a PLAIN class, whose identity `match_arguments` takes for equality."""
    return isinstance(value, PLAIN)
