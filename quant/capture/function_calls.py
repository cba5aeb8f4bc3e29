"""Notes the calls of torch's functions, methods and attributes that a function mode intercepts."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from quant.capture.call_results import CallResults
from quant.capture.calls import (
    ASKS_DTYPE,
    BRANCHES,
    LENGTH,
    METADATA,
    NORMS,
    OF_GRADIENTS,
    OF_MEMORY,
    RANDOM,
    RANKS,
    SET_DATA,
    SET_ITEM,
    SIZES,
    WHERE,
    called,
    called_at,
    canonical,
    inside_autograd_function,
    is_sized_by_values,
    says_it_writes,
)
from quant.capture.flags import decided_by_flags
from quant.capture.numbers import recorded
from quant.capture.tape import CONSTANT, GIVEN, STORED, Tape
from quant.capture.writes import Writes, version_of
from quant.graph import Kind, Node
from quant.runtime.names import attribute
from quant.runtime.trees import Attr, Ref, leaves


class FunctionCalls:
    """Notes calls of torch on a tape.

    Args:
        training: whether the graph is to be trained.
        until: the code object below whose frame the forward runs.
    """

    def __init__(self, tape: Tape, results: CallResults, writes: Writes, *, training: bool, until: CodeType) -> None:
        self.tape, self.results, self.writes = tape, results, writes
        self.training, self.until = training, until

    def note(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, known: Any
    ) -> Any:
        """Note one call; returns what the forward gets for it.

        Args:
            func, args, kwargs: the call, as a function mode gets it.
            value: its result.
            known: the tensors among its arguments, with their versions before the call.
        """
        kind, target, args, kwargs = canonical(func, args, kwargs)
        function = called_at(kind, target, args)
        self.tape.typed = self.tape.typed or (
            function in ASKS_DTYPE and self.tape.follows_from(self.tape.places(args)) == GIVEN
        )
        if function in OF_GRADIENTS:
            if self.tape.follows_from(self.tape.places(args)) != CONSTANT:
                self.tape.problem(self.tape.owner, "asks about the gradients of a tensor, which a graph does not know")
            return value
        if any(isinstance(leaf, torch.Generator) for leaf in leaves((args, kwargs))):
            self.tape.problem(self.tape.owner, "draws from a generator of its own")
        if function in OF_MEMORY and self.tape.is_given(args):
            self.tape.problem(self.tape.owner, "asks where an argument lies in memory")
        if function in METADATA or isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return value
        if self.training and inside_autograd_function(sys._getframe(2), self.until):
            self.tape.problem(self.tape.owner, "calls a torch.autograd.Function, whose backward no graph has")
        places: tuple[Any, Any] = (self.tape.places(args), self.tape.places(kwargs))
        follows = GIVEN if function in RANDOM else self.tape.follows_from(places)
        if function in SIZES and isinstance(value, (int, tuple)):
            return self._sized(kind, target, places, value, follows)
        tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
        changed = [tensor for tensor, version in known if version_of(tensor) != version]
        if function in SET_DATA:
            self.writes.set_data(args[0])
        if function in SET_ITEM:
            return self.writes.set_items(args, places)
        if (value is None and not changed) or not (places[0] or places[1] or tensors):
            return value
        if not tensors and not changed:
            return self._read(function, kind, target, places, value, follows)
        node = Node(len(self.tape.nodes), kind, target, *places, owner=self.tape.owner)
        sized = is_sized_by_values(function, args, kwargs) or (target is operator.getitem and _by_mask(args[1]))
        sized = sized or (function in WHERE and len(args) + len(kwargs) == 1) or self.tape.is_sized_by_values(places)
        if function in NORMS and (kwargs.get("training") is True or any(one is True for one in args)):
            self.writes.note_statistics(node, args, kwargs)
        if changed:
            return self.writes.written(node, value, changed, args, follows, says_it_writes(kind, target, kwargs))
        return self.results.note(node, value, follows, sized_by_values=sized)

    def _sized(self, kind: Kind, target: Any, places: tuple[Any, Any], value: Any, follows: int) -> Any:
        node = Node(len(self.tape.nodes), kind, target, *places, owner=self.tape.owner)
        static = not self.tape.is_sized_by_values(places)
        if not isinstance(value, tuple):
            is_length = called(node) in LENGTH
            if is_length:  # `len` returns a plain int
                node.kind, node.target, node.args = Kind.METHOD, "size", (places[0][0], 0)
            number = recorded(int(value), self.tape, self.tape.append(node, value, follows), static)
            if called(node) not in RANKS:
                self._note_size(number, places, follows)
            if is_length:
                self.tape.hold(number, "counts by")
            return self.tape.held_for_texts(number)
        self.tape.ranked = self.tape.ranked or follows == GIVEN  # the number of sizes itself is not noted
        index = self.tape.append(node, value, follows)
        items = []
        for place, size in enumerate(value):
            item = Node(len(self.tape.nodes), Kind.FUNCTION, operator.getitem, (Ref(index), place), owner=node.owner)
            items.append(recorded(int(size), self.tape, self.tape.append(item, int(size), follows), static))
            self._note_size(items[-1], places, follows)
        return self.tape.held_for_texts(type(value)(items))

    def _note_size(self, number: Any, places: tuple[Any, Any], follows: int) -> None:
        """Note a size for the proof, where it may be another one in other calls."""
        tensor = next((leaf for leaf in leaves(places) if isinstance(leaf, Ref)), None)
        if follows == GIVEN and number.static and tensor is not None:
            self.tape.sizes[number.index] = tensor.index

    def _read(self, function: Any, kind: Kind, target: Any, places: tuple[Any, Any], value: Any, follows: int) -> Any:
        """A call whose result is not a tensor: its values leave torch, unless they are the same in every call."""
        if follows == CONSTANT:
            return value
        stored = [leaf for leaf in leaves(places) if isinstance(leaf, Attr)]
        buffers = not any(isinstance(attribute(self.tape.root, one.path), nn.Parameter) for one in stored)
        stays = follows == STORED and buffers and isinstance(value, (bool, int, float)) and math.isfinite(value)
        asks = type(value) is bool and buffers and self.tape.holds_flags
        if stays or (asks and decided_by_flags(self.tape.nodes, places)):
            node = Node(len(self.tape.nodes), kind, target, *places, owner=self.tape.owner)
            self.tape.guard(Ref(self.tape.append(node, value, follows)), value)
            return value
        what = "branches on" if function in BRANCHES else "computes in Python with"
        self.tape.problem(self.tape.owner, f"{what} a tensor's values")
        return value


def _by_mask(key: Any) -> bool:
    keys = key if isinstance(key, tuple) else (key,)
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in keys)
