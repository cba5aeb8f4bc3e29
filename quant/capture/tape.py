"""The tape of one recording: its calls, and the place of each tensor and number.

A tensor is identified by its id, a parameter or buffer by its name, a number by the node that it carries
(`numbers.py`). The source of a value decides whether a number computed from it may be guarded.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.capture.called import IslandCalls
from quant.capture.executed_lines import ExecutedLines
from quant.capture.forward_code import writes_texts
from quant.capture.given_objects import GivenObjects
from quant.capture.numbers import NUMBERS, plain, recorded
from quant.capture.outer_objects import Outside
from quant.capture.range_steps import FARTHEST, largest_step
from quant.capture.returned_inputs import GivenBack
from quant.capture.scalars import ROUNDED, Limit, loses
from quant.capture.snapshot import Snapshot
from quant.capture.unrecordable import is_transformed
from quant.graph import Kind, Node, Span, TensorMeta
from quant.runtime.names import full_name
from quant.runtime.objects import opened
from quant.runtime.trees import Attr, Ref, leaves, map_leaves

WRITTEN = "reads a tensor after a view of it, or a call that got it, changed it in place"
CONSTANT, STORED, GIVEN = range(3)
"""The source of a value: constants only; parameters or buffers too; or inputs or random draws too."""


class Tape:
    """The calls of one module, with their results.

    Attributes:
        root, path: the module, and its dotted name in the model.
        islands: dotted name -> the reason that a module is an island.
        limits: sizes and numbers that are held to their values.
        before: the state of the model before the call.
        parts: that of each module within the root, by its name in the root.
        names: id of a module within the root -> its name in it.
        attributes: id of a tensor that a module holds -> its place.
        problems: dotted name in the model -> the reason that a module has to become an island.
        changed: dotted names in the model of parameters that calls changed.
        failed: the innermost module whose forward raised an error, and the error; or None.
        nodes: the calls.
        keeps: whether all results are kept, which takes the memory of a training step; else tensors live as long as
            the forward holds them, and those of the output longer.
        spans: calls of submodules that were seen through.
        called: dotted names of the modules that were called.
        opaque: islands that were called, in order.
        lines: of the user's functions, outside of islands.
        inside: modules that islands called.
        foreign: tensors of unknown origin that were read: the number of nodes at that time, the reader, the tensor.
        outside: places outside of the model that forwards reach; set by the caller where they are to be restored.
        rounded: nodes of numbers that may be the same for other sizes, such as quotients and remainders.
        sizes: node of a size that the forward read, or of a number that the caller gave -> node of its tensor, or
            its own.
        inputs: the tensors that the caller gave.
        given: the objects that the caller gave and a forward may change.
        where: id of a tensor that a call returned -> its place.
        by_storage: address of a storage -> the nodes of the tensors that share it.
        overwritten: nodes whose tensors were changed through other tensors.
        owners: the running modules, outermost first, by their names in the root.
        typed, ranked, contiguous: as of `Graph`.
        holds_flags: whether what integers and booleans of the caller's decide is guarded (`flags.py`).
        largest_step: that in which a forward that read a size may count to it (`range_steps.py`), up to FARTHEST.
        is_threaded: whether modules were called in threads other than the one that records.
    """

    def __init__(
        self,
        root: nn.Module,
        path: str,
        islands: Mapping[str, str],
        limits: tuple[Limit, ...],
        before: Snapshot,
        *,
        keeps: bool = False,
    ) -> None:
        self.before = before
        self.root, self.path, self.islands, self.limits, self.keeps = root, path, islands, limits, keeps
        self.parts = before.within(root)
        self.names = {id(part.module): name for name, part in self.parts.items()}
        self.attributes: dict[int, Attr] = {}
        for name, part in self.parts.items():
            for key, tensor in part.tensors:  # the first name counts
                self.attributes.setdefault(id(tensor), Attr(full_name(name, key)))
        self.problems: dict[str, str] = {}
        self.changed: set[str] = set()
        self.failed: tuple[str, Exception] | None = None
        self.nodes: list[Node] = []
        self.spans: list[Span] = []
        self.called: set[str] = set()
        self.opaque: list[str] = []
        self.foreign: list[tuple[int, str, Any]] = []
        self.outside = Outside()
        self.inside = IslandCalls(before, lambda: self.outside.reached())
        self.rounded: list[int] = []
        self.sizes: dict[int, int] = {}
        self.inputs: list[Tensor] = []
        self.given = GivenObjects()
        self.where: dict[int, Ref | Attr] = {}
        self.given_back = GivenBack(self.where)
        self.by_storage: dict[int, list[int]] = {}
        self.overwritten: set[int] = set()
        self.owners: list[str] = [""]
        self.is_recording = False
        self.lines = ExecutedLines()
        self.is_threaded = self.holds_flags = False
        self.largest_step = 0.0
        self.typed = self.ranked = self.contiguous = False
        self._values: list[Any] = []
        self._held: list[Any] = []
        self._sources: dict[int, int] = {}
        self._sized_by_values: set[int] = set()
        self._unsure: list[int] = []
        self._texts: dict[str, bool] = {}

    @property
    def owner(self) -> str:
        """The innermost running module, by its name in the root."""
        return self.owners[-1]

    @contextlib.contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Turn recording on or off, as within layers and islands and for our own calls."""
        before, self.is_recording = self.is_recording, on
        self.lines.switch(on)
        try:
            yield
        finally:
            self.is_recording = before
            self.lines.switch(before)

    def problem(self, name: str, reason: str) -> None:
        """Note that the module `name` (within the root) has to become an island."""
        self.problems.setdefault(full_name(self.path, name), f"its forward {reason}")

    def append(self, node: Node, value: Any, source: int, *, sized_by_values: bool = False) -> int:
        """Note a call and its result, which this node stands for from now on."""
        held = value
        if isinstance(value, Tensor):
            node.meta = TensorMeta(tuple(value.shape), value.dtype, value.layout)
            held = self.know(value, Ref(node.index))
            with contextlib.suppress(RuntimeError, NotImplementedError):
                if value.layout == torch.strided:
                    self.by_storage.setdefault(value.untyped_storage().data_ptr(), []).append(node.index)
        elif not self.keeps and not isinstance(value, (int, float)):
            held = None  # its parts are values of their own
        self.nodes.append(node)
        self._values.append(held)
        self._sources[node.index] = source
        if sized_by_values:
            self._sized_by_values.add(node.index)
        return node.index

    def know(self, tensor: Tensor, place: Ref) -> Any:
        """Identify a tensor with a place as long as it lives; returns the tensor or a weak reference to it."""
        self.where[id(tensor)] = place
        held = tensor if self.keeps else weakref.ref(tensor, functools.partial(_forget, self.where, id(tensor)))
        self._held.append(held)
        return held

    def value(self, index: int) -> Any:
        """The result of a call; None where it was released."""
        held = self._values[index]
        return held() if type(held) is weakref.ReferenceType else held

    def keep(self, tree: Any) -> None:
        """Keep the values that nested places name alive."""
        for leaf in leaves(tree):
            if isinstance(leaf, Ref):
                self._values[leaf.index] = self.value(leaf.index)

    def forget(self) -> None:
        """Release all values."""
        self._values, self._held, self.inputs = [], [], []

    def opened(self, tree: Any) -> Any:
        return opened(tree, _is_recorded)

    def places(self, tree: Any, *, own: bool = False) -> Any:
        """`tree` with the Ref or Attr of each known value; with `own`, a `Given` for each object of the caller's."""
        if own:
            return map_leaves(self.place, self._with_given_objects(tree))
        return map_leaves(self.place, self.opened(tree))

    def _with_given_objects(self, tree: Any) -> Any:
        if self.given.hold_each_other(tree, _is_recorded):
            self.problem("", "gives out objects that hold each other")
        return self.given.in_tree(tree, _is_recorded)

    def is_given(self, args: tuple[Any, ...]) -> bool:
        """Whether the first argument of a call is a tensor that the caller gave."""
        place = self.where.get(id(args[0])) if args else None
        return isinstance(place, Ref) and self.nodes[place.index].kind is Kind.INPUT

    def is_own_number(self, value: Any) -> bool:
        return type(value) in NUMBERS and value.recorder is self

    def place(self, leaf: Any) -> Any:
        if type(leaf) in NUMBERS:
            return Ref(leaf.index) if self.is_own_number(leaf) else plain(leaf)
        if not isinstance(leaf, Tensor):
            return leaf
        place = self.where.get(id(leaf)) or self.attributes.get(id(leaf))
        if place is None and is_transformed(leaf):
            self.problem(self.owner, "runs a transform of torch.func (vmap, grad, ...)")
        elif place is None:
            self.foreign.append((len(self.nodes), self.owner, leaf))
        if place is None:
            return leaf
        if isinstance(place, Ref) and place.index in self.overwritten:
            self.problem(self.owner, WRITTEN)
            self.overwritten.discard(place.index)  # later readers read the island's result
        return place

    def follows_from(self, tree: Any) -> int:
        """The strongest source of the values that nested places name."""
        strongest = CONSTANT
        for leaf in leaves(tree):
            if isinstance(leaf, Attr):
                strongest = max(strongest, STORED)
            elif isinstance(leaf, Ref):
                strongest = max(strongest, self._sources[leaf.index])
        return strongest

    def is_sized_by_values(self, tree: Any) -> bool:
        return any(isinstance(leaf, Ref) and leaf.index in self._sized_by_values for leaf in leaves(tree))

    def number(self, function: Callable[..., Any], operands: tuple[Any, ...], value: Any) -> Any:
        """Note arithmetic with recorded numbers; returns its result as a recorded number."""
        if not self.is_recording:
            return value
        places = self.places(operands)
        node = Node(len(self.nodes), Kind.FUNCTION, function, places, owner=self.owner)
        index = self.append(node, value, self.follows_from(places))
        static = all(one.static for one in operands if type(one) in NUMBERS)
        if static and (loses(function) or not set(self.rounded).isdisjoint(node.refs)):
            self.rounded.append(index)
            self._unsure.append(self.guard(Ref(index), value))
        if type(value) not in (int, float):  # numpy's or complex numbers, which cannot be recorded
            for one in operands:
                if type(one) in NUMBERS:
                    self.hold(one, "computes in Python with")
        return recorded(value, self, index, static)

    def compares(self, function: Callable[..., Any], one: Any, other: Any, verdict: bool) -> None:
        """Note that the forward branches on a comparison of numbers."""
        if not self.is_recording:
            return
        if not all(number.static for number in (one, other) if type(number) in NUMBERS):
            self.problem(self.owner, "branches on a tensor's values")
            return
        places = self.places((one, other))
        node = Node(len(self.nodes), Kind.FUNCTION, function, places, owner=self.owner)
        self.guard(Ref(self.append(node, verdict, self.follows_from(places))), verdict)

    def decides(self, number: Any, what: str) -> None:
        """Note that the forward branches on a number."""
        if self.is_recording:
            self.hold(number, what)

    def hold(self, number: Any, what: str) -> None:
        if not number.static:
            self.problem(self.owner, f"{what} a tensor's values")
            return
        self.guard(Ref(number.index), plain(number))

    def held_for_texts(self, tree: Any) -> Any:
        """Hold the numbers in `tree` where the running module formats numbers in C, or counts by them in unknown steps.

        Returns:
            `tree`.
        """
        numbers = [leaf for leaf in leaves(tree) if self.is_own_number(leaf) and leaf.static]
        if numbers and self.owner not in self._texts:
            module = self.parts[self.owner].module
            step = largest_step(module, module.forward)
            self.largest_step = max(self.largest_step, min(step, FARTHEST))
            self._texts[self.owner] = step > FARTHEST or writes_texts(module, module.forward)
        for number in numbers if numbers and self._texts[self.owner] else ():
            self.hold(number, "writes a text with")
        return tree

    def guard(self, place: Any, expected: Any) -> int:
        node = Node(len(self.nodes), Kind.GUARD, "guard", (place, expected), owner=self.owner)
        return self.append(node, expected, CONSTANT)

    def drop_needless_guards(self, output: Any) -> None:
        """Drop the guards of rounded numbers that calls read.

        A rounded number that no call reads may have been used unseen, as by `range`. Another size would show such a use
        of the size itself, but many sizes have the same quotient or remainder, so these guards stay.
        """
        if not self._unsure:
            return
        readers = Counter(ref for node in self.nodes for ref in node.refs)
        readers.update(leaf.index for leaf in leaves(output) if isinstance(leaf, Ref))
        for place, (guard, number) in enumerate(zip(self._unsure, self.rounded, strict=True)):
            if readers[number] > 1 and Limit(place, ROUNDED) not in self.limits:
                self.nodes[guard] = Node(
                    guard, Kind.FUNCTION, operator.pos, (Ref(number),), owner=self.nodes[guard].owner
                )


def _is_recorded(value: Any) -> bool:
    """Whether a value is known by a place of its own: a tensor, or a number that follows from sizes."""
    return isinstance(value, Tensor) or type(value) in NUMBERS


def _forget(where: dict[int, Any], key: int, _: Any) -> None:
    """Drop the place of a tensor that was freed, since another tensor may get its id."""
    where.pop(key, None)
