"""Compiles nested arguments with places into functions that fill in the values of a call.

`trees.map_leaves` looks at the class of every part at each call. Here that happens once, for tuples, lists and dicts,
which nearly all arguments are; other trees are left to `map_leaves`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from quant.runtime.trees import Attr, Ref, is_plain, map_leaves

Fill: TypeAlias = Callable[[Mapping[int, Any]], Any]
"""Returns a tree with the values of registers filled in."""

_CONSTANTS = frozenset({type(...), torch.dtype, torch.device, torch.memory_format, torch.layout})
"""Classes of constants besides plain ones."""


def filler(tree: Any, attribute: Callable[[str], Any] | None = None) -> Fill:
    """The function that fills a tree.

    Args:
        tree: nested, with Ref to registers.
        attribute: returns the parameter or buffer that an Attr names; None leaves each Attr as it is.
    """
    kind = type(tree)
    if kind is Ref:
        return operator.itemgetter(tree.index)
    if kind is Attr and attribute is not None:
        return lambda registers: attribute(tree.path)
    if kind is tuple:
        return _tuple(tree, attribute)
    if kind is list:
        parts = [filler(item, attribute) for item in tree]
        return lambda registers: [part(registers) for part in parts]
    if kind is dict:
        pairs = [(key, filler(item, attribute)) for key, item in tree.items()]
        return lambda registers: {key: part(registers) for key, part in pairs}
    if is_constant(tree):
        return lambda registers: tree
    if kind is slice:
        start, stop, step = (filler(end, attribute) for end in (tree.start, tree.stop, tree.step))
        return lambda registers: slice(start(registers), stop(registers), step(registers))
    return lambda registers: map_leaves(lambda leaf: _filled(leaf, registers, attribute), tree)


def _tuple(tree: tuple[Any, ...], attribute: Callable[[str], Any] | None) -> Fill:
    if all(map(is_constant, tree)):
        return lambda registers: tree
    if all(type(item) is Ref for item in tree) and len(tree) > 1:
        return operator.itemgetter(*(item.index for item in tree))
    parts = [filler(item, attribute) for item in tree]
    if len(parts) == 1:
        [only] = parts
        return lambda registers: (only(registers),)
    return lambda registers: tuple([part(registers) for part in parts])


def is_constant(tree: Any) -> bool:
    """Whether a tree is one value for all calls, which nobody can change."""
    if type(tree) is slice:
        return is_constant(tree.start) and is_constant(tree.stop) and is_constant(tree.step)
    return type(tree) in _CONSTANTS or is_plain(tree)


def _filled(leaf: Any, registers: Mapping[int, Any], attribute: Callable[[str], Any] | None) -> Any:
    if type(leaf) is Ref:
        return registers[leaf.index]
    return attribute(leaf.path) if type(leaf) is Attr and attribute is not None else leaf
