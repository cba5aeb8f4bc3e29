"""Objects that the caller gave: a forward may write on them or return them, and they stay the caller's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from quant.runtime.objects import Given, Instance, holds_itself, opened


class GivenObjects(dict[int, tuple[Any, Given]]):
    """id of an object -> the object, which keeps the id its own, and its place in the call's arguments."""

    def has(self, value: Any) -> bool:
        """Whether the caller gave this very object."""
        return id(value) in self and self[id(value)][0] is value

    def hold_each_other(self, tree: Any, is_leaf: Callable[[Any], bool]) -> bool:
        """Whether objects in `tree` that the caller did not give hold each other."""
        return not self.has(tree) and holds_itself(tree, lambda leaf: is_leaf(leaf) or self.has(leaf))

    def in_tree(self, tree: Any, is_leaf: Callable[[Any], bool]) -> Any:
        """`tree` opened down to its leaves, with a `Given` in place of each object of the caller's."""
        if self.has(tree):
            return self[id(tree)][1]
        return self._swapped(opened(tree, lambda leaf: is_leaf(leaf) or self.has(leaf)))

    def _swapped(self, tree: Any) -> Any:
        if self.has(tree):  # which may be a container
            return self[id(tree)][1]
        kind = type(tree)
        if kind is Instance:
            return Instance(tree.kind, self._swapped(tree.attributes), self._swapped(tree.items))
        if kind in (tuple, list):
            return kind(self._swapped(item) for item in tree)
        if kind is dict:
            return {key: self._swapped(value) for key, value in tree.items()}
        if issubclass(kind, Mapping) and not isinstance(tree, Tensor):
            with contextlib.suppress(TypeError):
                return kind({key: self._swapped(value) for key, value in tree.items()})  # type: ignore[call-arg]
        return tree
