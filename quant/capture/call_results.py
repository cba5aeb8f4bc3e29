"""Notes calls with their results; each tensor and number in a result is a value of its own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quant.capture.calls import COUNTED, GIVES_BACK, called
from quant.capture.numbers import recorded
from quant.capture.tape import GIVEN, Tape
from quant.graph import Kind, Node
from quant.runtime.objects import Instance
from quant.runtime.trees import Ref


class CallResults:
    """Notes calls and their results on a tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def note(
        self,
        node: Node,
        value: Any,
        follows: int,
        *,
        sized_by_values: bool = False,
        hold: Callable[[], None] | None = None,
    ) -> Any:
        """Note a call with its result; returns what the forward gets for it.

        Args:
            node: the call.
            value: its result.
            follows: the strongest source of its arguments (`tape.py`).
            sized_by_values: whether the sizes of the result depend on values.
            hold: notes more of the call, before any part of its result.
        """
        if isinstance(value, Tensor):
            if id(value) in self.tape.where or id(value) in self.tape.attributes:
                if called(node) in GIVES_BACK:
                    return self._same_tensor(node, value, follows, sized_by_values)
                value = value.view_as(value) if value.layout == torch.strided else value.clone()
            self.tape.append(node, value, follows, sized_by_values=sized_by_values)
            if hold is not None:
                hold()
            return value
        index = self.tape.append(node, value, follows)
        if hold is not None:
            hold()
        if called(node) in COUNTED:
            self._hold_count(node, len(value), sized_by_values)
        return self._parts(value, index, node.owner, follows, sized_by_values)

    def _same_tensor(self, node: Node, value: Tensor, follows: int, sized_by_values: bool) -> Tensor:
        """Note a call that returned one of its arguments."""
        older = self.tape.where.get(id(value))
        if older is None:  # a parameter or buffer, which is read anew at every run
            self.tape.typed = self.tape.typed or self.tape.follows_from((node.args[1:], node.kwargs)) == GIVEN
            return value
        index = self.tape.append(node, value, follows, sized_by_values=sized_by_values)
        self.tape.given_back.note(value, older, Ref(index))
        return value

    def _hold_count(self, node: Node, count: int, sized_by_values: bool) -> None:
        """Guard the number of parts of a result, which depends on a size."""
        if sized_by_values:
            self.tape.problem(node.owner, "counts by a tensor's values")
        length = Node(len(self.tape.nodes), Kind.FUNCTION, len, (Ref(node.index),), owner=node.owner)
        self.tape.guard(Ref(self.tape.append(length, count, GIVEN)), count)

    def _parts(
        self, value: Any, index: int, owner: str, follows: int, sized_by_values: bool, around: tuple[int, ...] = ()
    ) -> Any:
        """The result of node `index`, with its tensors and numbers noted as parts of it."""
        inside = (*around, id(value))

        def part(item: Any, function: Callable[..., Any], key: Any) -> Any:
            if (
                item is None
                or isinstance(item, (str, bool))
                or (isinstance(item, Tensor) and id(item) in self.tape.where)
            ):
                return item
            if id(item) in inside:  # objects that hold each other
                return item
            node = Node(len(self.tape.nodes), Kind.FUNCTION, function, (Ref(index), key), owner=owner)
            if isinstance(item, Tensor):
                self.tape.append(node, item, follows, sized_by_values=sized_by_values)
                return item
            if type(item) in (int, float):
                return recorded(item, self.tape, self.tape.append(node, item, follows), False)
            if not isinstance(item, (tuple, list, dict, Mapping)) and type(self.tape.opened(item)) is not Instance:
                return item
            return self._parts(item, self.tape.append(node, item, follows), owner, follows, sized_by_values, inside)

        if type(value) in (tuple, list):
            return type(value)(part(item, operator.getitem, place) for place, item in enumerate(value))
        if type(value) is dict:
            return {key: part(item, operator.getitem, key) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            for place, item in enumerate(value):
                part(item, operator.getitem, place)
            return value
        if isinstance(value, Mapping):
            for key, item in value.items():
                part(item, operator.getitem, key)
            return value
        instance = self.tape.opened(value)
        if type(instance) is Instance:
            for name in instance.attributes:
                part(getattr(value, name), getattr, name)
        return value
