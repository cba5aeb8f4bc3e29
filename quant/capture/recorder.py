"""The recorder: runs a module on real tensors, and notes the calls that it makes as a graph.

Tensors are the user's own; torch says what is called (`TorchFunctionMode`), and each submodule what it is called with
(`watched.py`). A tensor is known by its identity, a size by a subclass of int (`numbers.py`). What takes values out of
torch is seen to do so, and the innermost module that does it is noted as an island; the run goes on, with the right
values, to find all of them at once.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quant.arguments import bind, kept
from quant.capture.attention import forward_of
from quant.capture.called import IslandCalls
from quant.capture.calls import (
    COUNTED,
    GIVES_BACK,
    METADATA,
    OF_GRADIENTS,
    RANDOM,
    SIZED_BY_VALUES,
    SIZES,
    called_name,
    canonical,
    inside_autograd_function,
    says_it_writes,
    share_storage,
    with_items,
    write_items,
)
from quant.capture.given_back import GivenBack
from quant.capture.numbers import NUMBERS, plain, recorded
from quant.capture.outside import Outside, named_in
from quant.capture.scalars import NUMBER, ROUNDED, Limit, loses, with_numbers
from quant.capture.state import Snapshot, differs, modes_of, same_content, state_of, storages_of
from quant.capture.surroundings import Chance, OwnParameters
from quant.capture.unseen import asked, is_transformed, out_of_sight, said_of, stand_ins
from quant.dead_calls import remove_dead
from quant.graph import Attr, Graph, Node, Ref, Region, TensorMeta, attribute, leaves, map_leaves
from quant.leaves import is_leaf
from quant.names import full_name
from quant.objects import Given, Instance, Result, Write, containers, content, holds_itself, holds_objects, opened

WRITTEN = "reads a tensor after a view of it, or a call that got it, changed it in place"
ASKS_DTYPE = {"dtype", "is_floating_point", "is_complex", "type"}
CONSTANT, STORED, GIVEN = range(3)
"""What a value follows from: from constants alone, from parameters and buffers too, from inputs or chance too."""


class Recorder(TorchFunctionMode):
    """Records one call of a module.

    Attributes:
        problems: by dotted name within the model, why a module is to run as it is; filled by `run`.
        failed: the innermost module whose forward raised an error, and the error, if one did.
        nodes, values: the calls, and what each gave.
        regions: calls of submodules that were seen through.
        opaque: islands that were called, in order.
        inside: modules that islands called.
        foreign: tensors of unknown origin that were read, each with the place in `nodes` and the module that read it.
        outside: what forwards reach outside of the model; set by the caller where it is to be put back.
        tensors: of the call, in the order of `tensors_in`; set by the caller where limits need them.
        rounded: the nodes of numbers that other sizes may leave as they are, as quotients and remainders.
        numbers: of the call, in the order of `scalars.with_numbers`.
        output: nested, with Ref; set by `run`.
        result: what the module returned.
    """

    def __init__(
        self,
        root: nn.Module,
        path: str,
        islands: Mapping[str, str],
        limits: tuple[Limit, ...] = (),
        *,
        training: bool = False,
    ) -> None:
        super().__init__()
        self.root, self.path, self.islands, self.limits, self.training = root, path, islands, limits, training
        self.names = {id(module): name for name, module in root.named_modules()}
        self.attributes = _attributes(root)
        self.nodes: list[Node] = []
        self.values: list[Any] = []
        self.regions: list[Region] = []
        self.opaque: list[str] = []
        self.problems: dict[str, str] = {}
        self.failed: tuple[str, Exception] | None = None
        self.called: set[str] = set()
        self.foreign: list[tuple[int, str, Any]] = []
        self.outside = Outside()
        self.output: Any = None
        self.result: Any = None
        self.arguments: dict[str, Any] = {}
        self.expected: dict[str, Any] = {}
        self.tensors: list[Tensor] = []
        self.numbers: list[int | float] = []
        self._inputs: list[Tensor] = []
        self._given: dict[int, tuple[Any, Given]] = {}
        self._set_modes: set[str] = set()
        self._state: dict[str, dict[str, Any]] = {}
        self._stored: dict[int, torch.UntypedStorage] = {}
        self._where: dict[int, Ref | Attr] = {}
        self._given_back = GivenBack(self._where)
        self._parameters, self._chance = OwnParameters(root), Chance(root)
        self.inside = IslandCalls(self._parameters, lambda: self.outside.reached())
        self._sources: dict[int, int] = {}
        self._sized_by_values: set[int] = set()
        self.rounded: list[int] = []
        self._unsure: list[int] = []
        self._overwritten: set[int] = set()
        self._by_storage: dict[int, list[int]] = {}
        self._owners: list[str] = [""]
        self._sites: dict[str, int] = {}
        self._recording = False
        self._typed = self._ranked = self._contiguous = False

    # ------------------------------------------------------------------------------------------------ running

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the root, and note what it does."""
        args, kwargs = with_numbers(self.root, (args, kwargs), self._number_input)
        self._take_arguments(args, kwargs)
        for name, value in self.arguments.items():
            containers(value, Given(name), self._given, lambda leaf: isinstance(leaf, Tensor))
        before = {key: content(value) for key, (value, _) in self._given.items()}
        self._hold_sizes()
        self._state, self._stored = state_of(self.root), storages_of(self.root)
        with self:
            if is_leaf(self.root):
                self.result = self._call_leaf(self.root, "", args, kwargs, type(self.root).forward)
            else:
                modes = modes_of(self.root)
                with self._switched(True), self._noting_errors(""):
                    self.result = forward_of(self.root, self.root.forward)(*args, **kwargs)
                self._hold_modes("", self.root, modes)
            self._end(before)
        self.called.add(self.path)

    def again(self, *, training: bool) -> Recorder:
        """A recorder of another call of the same kind."""
        return Recorder(self.root, self.path, self.islands, self.limits, training=training)

    def take_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Any]:
        """The tensors and numbers of a call, by the nodes that stand for them."""
        self._take_arguments(*with_numbers(self.root, (args, kwargs), self._number_input))
        return dict(enumerate(self.values))

    def _take_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments = bind(self.root, args, kwargs)
        self.expected = {name: self._take(name, value) for name, value in self.arguments.items()}

    def _number_input(self, name: str, value: Any) -> Any:
        """A number that the caller gives, as an input of the graph, where it is not held to what it was."""
        self.numbers.append(value)
        if Limit(len(self.numbers) - 1, NUMBER) in self.limits:
            return value
        node = Node(len(self.nodes), "input", name, number=type(value))
        return recorded(value, self, self._append(node, value, GIVEN), True)

    def graph(self) -> Graph:
        """What was recorded, without what nobody needs."""
        asked = {"typed": self._typed, "ranked": self._ranked, "contiguous": self._contiguous}
        return remove_dead(Graph(self.path, self.nodes, self.expected, self.output, self.regions, **asked))

    def _end(self, before: dict[int, Any]) -> None:
        value = self._output_places(self.result)
        writes = [*self._argument_writes(before), *self._attribute_writes(self._state)]
        self._drop_needless_guards((value, writes))
        self.output = Result(value, tuple(writes)) if writes or holds_objects(value) else value

    def _output_places(self, result: Any) -> Any:
        for leaf in leaves(self._opened(result)):
            if _is_lazy(leaf):
                self.problem("", f"returns a {type(leaf).__name__}, which runs after the call")
        return self.places(result, own=True)

    def _argument_writes(self, before: dict[int, Any]) -> Iterator[Write]:
        for key, (value, given) in list(self._given.items()):
            if not same_content(before[key], content(value)):
                attributes, items = content(value)
                yield Write(given, (self.places(attributes, own=True), self.places(items, own=True)))

    def _attribute_writes(self, before: dict[str, dict[str, Any]]) -> Iterator[Write]:
        for path, attributes in state_of(self.root).items():
            if path not in before:
                continue  # a new submodule is a change of its parent's
            changed = {
                name
                for name in {*attributes, *before[path]}
                # A number that follows from this call's sizes was set in it, though it may be what it was before.
                if differs(before[path], attributes, name) or self._is_own_number(attributes.get(name))
            }
            for name in sorted(changed):
                value = attributes.get(name)
                if name not in attributes or isinstance(value, (nn.Module, nn.Parameter, Snapshot)):
                    self.problem(path, f"changes its attribute '{name}'")
                else:
                    yield Write(full_name(path, name), self.places(value))

    @contextlib.contextmanager
    def _switched(self, on: bool) -> Iterator[None]:
        """Record calls, or let them pass: those of a layer and of an island, and our own."""
        before, self._recording = self._recording, on
        try:
            yield
        finally:
            self._recording = before

    @contextlib.contextmanager
    def _noting_errors(self, name: str) -> Iterator[None]:
        """Note whose forward an error comes from: a module is asked for it before those that it is in."""
        try:
            yield
        except Exception as error:
            if self.failed is None or self.failed[1] is not error:
                self.failed = full_name(self.path, name), error
            raise

    def problem(self, name: str, reason: str) -> None:
        """Note that the module `name` (within the root) has to run as it is."""
        self.problems.setdefault(full_name(self.path, name), f"its forward {reason}")

    def _charge_chance(self) -> None:
        """The module that runs is the one that drew the random numbers since the last call of a submodule."""
        if self._chance.was_drawn_from():
            self.problem(self._owners[-1], "draws random numbers outside of torch")

    # ------------------------------------------------------------------------------------------------ values

    def _take(self, name: str, value: Any) -> Any:
        return map_leaves(lambda leaf: self._input(name, leaf), self._opened(value))

    def _input(self, name: str, leaf: Any) -> Any:
        if type(leaf) in NUMBERS:
            return Ref(leaf.index)
        if not isinstance(leaf, Tensor):
            return kept(leaf)  # as it is now: the forward may change it
        if id(leaf) in self.attributes:
            return self._place(leaf)
        if id(leaf) in self._where:
            return self._where[id(leaf)]
        asked = named_in(self.root, leaf.__dict__.keys())  # torch, too, leaves marks on tensors that it has exported
        if asked:
            self.problem("", f"gets a tensor with an attribute '{asked}' of the caller's")
        self._inputs.append(leaf)
        index = self._append(Node(len(self.nodes), "input", name), leaf, GIVEN)
        return Ref(index)

    def _hold_sizes(self) -> None:
        for limit in self.limits:
            if limit.dim < 0:
                continue
            tensor = self.tensors[limit.place]
            node = Node(len(self.nodes), "method", "size", (self._where[id(tensor)], limit.dim))
            index = self._append(node, tensor.shape[limit.dim], GIVEN)
            self._guard(Ref(index), tensor.shape[limit.dim])

    def _append(self, node: Node, value: Any, source: int, *, sized_by_values: bool = False) -> int:
        """Note a call; its tensor is known by this node from now on."""
        if isinstance(value, Tensor):
            node.meta = TensorMeta(tuple(value.shape), value.dtype, value.layout)
            self._where[id(value)] = Ref(node.index)
            with contextlib.suppress(RuntimeError, NotImplementedError):
                if value.layout == torch.strided:
                    self._by_storage.setdefault(value.untyped_storage().data_ptr(), []).append(node.index)
        self.nodes.append(node)
        self.values.append(value)
        self._sources[node.index] = source
        if sized_by_values:
            self._sized_by_values.add(node.index)
        return node.index

    def _opened(self, tree: Any) -> Any:
        return opened(tree, lambda leaf: isinstance(leaf, Tensor) or type(leaf) in NUMBERS)

    def places(self, tree: Any, *, own: bool = False) -> Any:
        """`tree` with Ref or Attr for what is known; with `own`, objects that the caller gave are `Given`."""
        if own:
            return map_leaves(self._place, self._with_given(tree))
        return map_leaves(self._place, self._opened(tree))

    def _with_given(self, tree: Any) -> Any:
        def known(leaf: Any) -> bool:
            return isinstance(leaf, Tensor) or type(leaf) in NUMBERS or self._is_given(leaf)

        def swap(leaf: Any) -> Any:
            return self._given[id(leaf)][1] if self._is_given(leaf) else leaf

        if self._is_given(tree):
            return swap(tree)
        if holds_itself(tree, known):
            self.problem("", "gives out objects that hold each other")
        return _swapped(opened(tree, known), swap, self._is_given)

    def _is_given(self, value: Any) -> bool:
        return id(value) in self._given and self._given[id(value)][0] is value

    def _is_own_number(self, value: Any) -> bool:
        return type(value) in NUMBERS and value.recorder is self

    def _place(self, leaf: Any) -> Any:
        if type(leaf) in NUMBERS:
            return Ref(leaf.index) if self._is_own_number(leaf) else plain(leaf)
        if not isinstance(leaf, Tensor):
            return leaf
        place = self._where.get(id(leaf)) or self.attributes.get(id(leaf))
        if place is None and is_transformed(leaf):
            self.problem(self._owners[-1], "runs a transform of torch.func (vmap, grad, ...)")
        elif place is None:
            self.foreign.append((len(self.nodes), self._owners[-1], leaf))
        if place is None:
            return leaf
        if isinstance(place, Ref) and place.index in self._overwritten:
            self.problem(self._owners[-1], WRITTEN)
        return place

    def _follows_from(self, tree: Any) -> int:
        """The highest source of what nested places name."""
        found = CONSTANT
        for leaf in leaves(tree):
            if isinstance(leaf, Attr):
                found = max(found, STORED)
            elif isinstance(leaf, Ref):
                found = max(found, self._sources[leaf.index])
        return found

    def _is_sized_by_values(self, tree: Any) -> bool:
        return any(isinstance(leaf, Ref) and leaf.index in self._sized_by_values for leaf in leaves(tree))

    # ------------------------------------------------------------------------------------------------ numbers

    def number(self, function: Callable[..., Any], operands: tuple[Any, ...], value: Any) -> Any:
        """The result of arithmetic with recorded numbers."""
        if not self._recording:
            return value
        places = self.places(operands)
        node = Node(len(self.nodes), "function", function, places, owner=self._owners[-1])
        index = self._append(node, value, self._follows_from(places))
        static = all(one.static for one in operands if type(one) in NUMBERS)
        if static and (loses(function) or not set(self.rounded).isdisjoint(node.refs)):
            self.rounded.append(index)
            self._unsure.append(self._guard(Ref(index), value))
        if type(value) not in (int, float):  # numpy's, or complex: no longer a number that can be followed
            for one in operands:
                if type(one) in NUMBERS:
                    self._hold(one, "computes in Python with")
        return recorded(value, self, index, static)

    def compares(self, function: Callable[..., Any], one: Any, other: Any, verdict: bool) -> None:
        """Note that the forward went on by the verdict of a comparison."""
        if not self._recording:
            return
        if not all(number.static for number in (one, other) if type(number) in NUMBERS):
            self.problem(self._owners[-1], "branches on a tensor's values")
            return
        places = self.places((one, other))
        node = Node(len(self.nodes), "function", function, places, owner=self._owners[-1])
        self._guard(Ref(self._append(node, verdict, self._follows_from(places))), verdict)

    def decides(self, number: Any, what: str) -> None:
        """Note that the forward went on by a number itself."""
        if self._recording:
            self._hold(number, what)

    def _hold(self, number: Any, what: str) -> None:
        if not number.static:
            self.problem(self._owners[-1], f"{what} a tensor's values")
            return
        self._guard(Ref(number.index), plain(number))

    def _guard(self, place: Any, expected: Any) -> int:
        node = Node(len(self.nodes), "guard", "guard", (place, expected), owner=self._owners[-1])
        return self._append(node, expected, CONSTANT)

    def _drop_needless_guards(self, output: Any) -> None:
        """Keep the guards of rounded numbers that no call reads: Python took them unseen, as `range` does, or nobody.

        Another size shows a count that follows from it; but many sizes have the same quotient or remainder.
        """
        readers = Counter(ref for node in self.nodes for ref in node.refs)
        readers.update(leaf.index for leaf in leaves(output) if isinstance(leaf, Ref))
        for place, (guard, number) in enumerate(zip(self._unsure, self.rounded, strict=True)):
            if readers[number] > 1 and Limit(place, ROUNDED) not in self.limits:
                self.nodes[guard] = Node(guard, "function", operator.pos, (Ref(number),), owner=self.nodes[guard].owner)

    # ------------------------------------------------------------------------------------------------ functions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._recording or self.inside.is_elsewhere:
            return func(*args, **kwargs)
        strangers = stand_ins(types, (args, kwargs))
        if strangers:
            with self:  # what they make of the call is seen
                return asked(strangers, func, types, args, kwargs)
        with self._switched(False):
            real_args, real_kwargs = _plain((args, kwargs))
            known = _versions((real_args, real_kwargs))
            value = func(*real_args, **real_kwargs)
            try:
                return self._note(func, args, kwargs, value, known)
            except Exception as error:  # of tensors that torch itself cannot be asked about
                name = getattr(func, "__name__", str(func))
                self.problem(self._owners[-1], f"calls {name}, which cannot be followed: {said_of(error)}")
                return value

    def _note(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, known: Any
    ) -> Any:
        kind, target, args, kwargs = canonical(func, args, kwargs)
        name = called_name(target, args)
        self._typed = self._typed or (name in ASKS_DTYPE and self._follows_from(self.places(args)) == GIVEN)
        if name in OF_GRADIENTS:
            if self._follows_from(self.places(args)) != CONSTANT:
                self.problem(self._owners[-1], "asks about the gradients of a tensor, which a graph does not know")
            return value
        if any(isinstance(leaf, torch.Generator) for leaf in leaves((args, kwargs))):
            self.problem(self._owners[-1], "draws from a generator of its own")
        if name in METADATA or isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return value
        if self.training and inside_autograd_function(sys._getframe(2), Recorder.run.__code__):
            self.problem(self._owners[-1], "calls a torch.autograd.Function, whose backward no graph has")
        places: tuple[Any, Any] = (self.places(args), self.places(kwargs))
        follows = GIVEN if name in RANDOM else self._follows_from(places)
        if name in SIZES and isinstance(value, (int, tuple)):
            return self._sized(kind, target, places, value, follows)
        tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
        changed = [tensor for tensor, version in known if _version(tensor) != version]
        if name == "__setitem__":
            return self._set_items(args, places)
        if (value is None and not changed) or not (places[0] or places[1] or tensors):
            return value
        if not tensors and not changed:
            return self._read(name, kind, target, places, value, follows)
        node = Node(len(self.nodes), kind, target, *places, owner=self._owners[-1])  # type: ignore[arg-type]
        sized = name in SIZED_BY_VALUES or (target is operator.getitem and _by_mask(args[1]))
        sized = sized or (name == "where" and len(args) + len(kwargs) == 1) or self._is_sized_by_values(places)
        if changed:
            return self._written(node, value, changed, args, follows, says_it_writes(kind, target, kwargs))
        return self._results(node, value, follows, sized_by_values=sized)

    def _results(self, node: Node, value: Any, follows: int, *, sized_by_values: bool = False) -> Any:
        """Note a call with its results, each part of which is a value of its own."""
        if isinstance(value, Tensor):
            if id(value) in self._where or id(value) in self.attributes:
                if node.kind != "module" and called_name(node.target, node.args) in GIVES_BACK:
                    return self._same_tensor(node, value, follows, sized_by_values)
                value = value.view_as(value) if value.layout == torch.strided else value.clone()
            self._append(node, value, follows, sized_by_values=sized_by_values)
            return value
        index = self._append(node, value, follows)
        if called_name(node.target, node.args) in COUNTED:
            self._hold_count(node, len(value), sized_by_values)
        return self._parts(value, index, node.owner, follows, sized_by_values)

    def _same_tensor(self, node: Node, value: Tensor, follows: int, sized_by_values: bool) -> Tensor:
        """A call that gave its tensor back as it is."""
        older = self._where.get(id(value))
        if older is None:  # a parameter or buffer, which is read anew at every run
            self._typed = self._typed or self._follows_from((node.args[1:], node.kwargs)) == GIVEN
            return value
        index = self._append(node, value, follows, sized_by_values=sized_by_values)
        self._given_back.note(value, older, Ref(index))
        return value

    def _hold_count(self, node: Node, count: int, sized_by_values: bool) -> None:
        """The forward goes on with so many parts, which follows from a size."""
        if sized_by_values:
            self.problem(node.owner, "counts by a tensor's values")
        length = Node(len(self.nodes), "function", len, (Ref(node.index),), owner=node.owner)
        self._guard(Ref(self._append(length, count, GIVEN)), count)

    def _parts(
        self, value: Any, index: int, owner: str, follows: int, sized_by_values: bool, around: tuple[int, ...] = ()
    ) -> Any:
        """`value`, the value of node `index`, with its tensors and numbers known as parts of it."""
        inside = (*around, id(value))

        def part(item: Any, function: Callable[..., Any], key: Any) -> Any:
            if item is None or isinstance(item, (str, bool)) or (isinstance(item, Tensor) and id(item) in self._where):
                return item
            if id(item) in inside:  # objects that hold each other
                return item
            node = Node(len(self.nodes), "function", function, (Ref(index), key), owner=owner)
            if isinstance(item, Tensor):
                self._append(node, item, follows, sized_by_values=sized_by_values)
                return item
            if type(item) in (int, float):
                return recorded(item, self, self._append(node, item, follows), False)
            if not isinstance(item, (tuple, list, dict, Mapping)) and type(self._opened(item)) is not Instance:
                return item
            return self._parts(item, self._append(node, item, follows), owner, follows, sized_by_values, inside)

        if type(value) in (tuple, list):
            return type(value)(part(item, operator.getitem, place) for place, item in enumerate(value))
        if isinstance(value, (tuple, list)):
            for place, item in enumerate(value):
                part(item, operator.getitem, place)
            return value
        if isinstance(value, Mapping):
            for key, item in value.items():
                part(item, operator.getitem, key)
            return value
        instance = self._opened(value)
        if type(instance) is Instance:
            for name in instance.attributes:
                part(getattr(value, name), getattr, name)
        return value

    def _sized(self, kind: str, target: Any, places: tuple[Any, Any], value: Any, follows: int) -> Any:
        node = Node(len(self.nodes), kind, target, *places, owner=self._owners[-1])  # type: ignore[arg-type]
        static = not self._is_sized_by_values(places)
        if not isinstance(value, tuple):
            name = called_name(target, places[0])
            if name == "__len__":  # `len` makes a number of its own of whatever it is given
                node.kind, node.target, node.args = "method", "size", (places[0][0], 0)
            number = recorded(int(value), self, self._append(node, value, follows), static)
            if name == "__len__":
                self._hold(number, "counts by")
            return number
        self._ranked = self._ranked or follows == GIVEN  # how many sizes there are is not noted
        index = self._append(node, value, follows)
        items = []
        for place, size in enumerate(value):
            item = Node(len(self.nodes), "function", operator.getitem, (Ref(index), place), owner=node.owner)
            items.append(recorded(int(size), self, self._append(item, int(size), follows), static))
        return type(value)(items)

    def _read(self, name: str, kind: str, target: Any, places: tuple[Any, Any], value: Any, follows: int) -> Any:
        """A call that gives something that is no tensor: values leave torch, unless they are the same in every call."""
        if follows == CONSTANT:
            return value
        stored = [leaf for leaf in leaves(places) if isinstance(leaf, Attr)]
        buffers = not any(isinstance(attribute(self.root, one.path), nn.Parameter) for one in stored)
        if follows == STORED and buffers and isinstance(value, (bool, int, float)) and math.isfinite(value):
            node = Node(len(self.nodes), kind, target, *places, owner=self._owners[-1])  # type: ignore[arg-type]
            self._guard(Ref(self._append(node, value, follows)), value)
            return value
        what = "branches on" if name in ("__bool__", "is_nonzero", "equal", "allclose") else "computes in Python with"
        self.problem(self._owners[-1], f"{what} a tensor's values")
        return value

    # ------------------------------------------------------------------------------------------------ writes

    def _set_items(self, args: tuple[Any, ...], places: tuple[Any, Any]) -> None:
        """x[key] = value: a copy with other items, or, of what the caller can see, x itself."""
        x, outlives = args[0], self._outlives(args[0])
        target = write_items if outlives else with_items
        node = Node(len(self.nodes), "function", target, places[0], owner=self._owners[-1], writes=outlives)
        self._overwrite([x], keep=x)
        self._append(node, x, self._follows_from(places))

    def _written(
        self, node: Node, value: Any, changed: list[Tensor], args: tuple[Any, ...], follows: int, said: bool
    ) -> Any:
        """A call that changed tensors: readers of the first argument read the result, and of other views nothing."""
        first = args[0] if args else next(iter(node.kwargs.values()), None)
        alone = all(tensor is first for tensor in changed)
        node.writes = any(self._outlives(tensor) for tensor in changed)
        if not (alone and said and isinstance(value, Tensor) and (value is first or share_storage(value, first))):
            self._overwrite(changed, keep=None)
            return self._results(node, value, follows)
        if isinstance(self.attributes.get(id(first)), Attr) and isinstance(first, nn.Parameter):
            self.problem(self._owners[-1], "changes a parameter")
        self._overwrite(changed, keep=first)
        index = self._append(node, first, follows)
        if value is not first and isinstance(value, Tensor):
            self._where[id(value)] = Ref(index)
        return value

    def _overwrite(self, changed: list[Tensor], keep: Any) -> None:
        """What lies over the memory of changed tensors cannot be read by its old place any more."""
        if keep is not None and self._given_back.holds(keep):
            # Where inputs lie otherwise, or are of another dtype, the call would have given a copy.
            self._typed = self._contiguous = True
            if not all(tensor.is_contiguous() for tensor in self._inputs if tensor.layout == torch.strided):
                self.problem(self._owners[-1], "writes to a tensor that a call gave back as it is")
        for tensor in changed:
            place = self._where.get(id(tensor))
            own = place.index if tensor is keep and isinstance(place, Ref) else None
            found = self._by_storage.get(tensor.untyped_storage().data_ptr(), []) if tensor.numel() else []
            for index in found:
                # Whoever holds the tensor itself finds its new node, by identity.
                if index != own and self.values[index] is not keep:
                    self._overwritten.add(index)
            if self._stores(tensor) and tensor is not keep:
                self.problem(self._owners[-1], "changes a parameter or a buffer in place")

    def _stores(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor was a parameter's or a buffer's when the call began."""
        if tensor.numel() == 0:
            return False
        return tensor.untyped_storage().data_ptr() in self._stored

    def _outlives(self, tensor: Any) -> bool:
        """Whether the caller sees what is written to a tensor: it is an input's, a parameter's or a buffer's memory."""
        return any(share_storage(tensor, one) for one in self._inputs) or self._stores(tensor)

    # ------------------------------------------------------------------------------------------------ modules

    def on_copy(self, module: nn.Module) -> None:
        """A forward copies a module: its copy would be of the int8 layer, whatever is then changed in it."""
        name = self.names.get(id(module))
        if name is not None and not self.inside.is_elsewhere:
            self.problem(self._owners[-1], f"copies {name or 'itself'}")
            self.problem(name, "is copied by another")

    def on_call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What happens instead of a submodule's forward."""
        name = self.names.get(id(module))
        if self.inside.is_elsewhere:
            return self._call_elsewhere(module, name, forward, args, kwargs)
        seen_through = self._recording and name is not None and full_name(self.path, name) not in self.islands
        if self._recording:
            self._charge_chance()
        self.outside.enter(module, forward)
        try:
            return self._call(module, name, forward, args, kwargs)
        finally:
            label = self.outside.leave()
            if label and seen_through:
                self.problem(str(name), f"changes '{label}', which is outside of the model")

    def _call_elsewhere(
        self, module: nn.Module, name: str | None, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """A module called in another thread."""
        if self.inside.running is None:
            self.problem(self._owners[-1], "calls modules in another thread")
            return forward(*args, **kwargs)
        return self._call_inside(module, name, forward, args, kwargs)

    def _call(
        self, module: nn.Module, name: str | None, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if not self._recording:
            return self._call_inside(module, name, forward, args, kwargs)
        if name is None or module is self.root:
            output = forward(*args, **kwargs)
            self._charge_chance()
            return output
        path = full_name(self.path, name)
        self.called.add(path)
        with self._switched(False):
            if path in self.islands:
                return self._call_island(module, name, args, kwargs, forward)
            if is_leaf(module) or isinstance(module, torch.jit.ScriptModule):
                return self._call_leaf(module, name, args, kwargs, forward)
            return self._enter(module, name, forward, args, kwargs)

    def _enter(self, module: nn.Module, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See through a container."""
        start, end_calls = len(self.nodes), self._given_back.mark()
        arguments = {key: self.places(value) for key, value in bind(module, args, kwargs).items()}
        self._owners.append(name)
        modes = modes_of(module)
        try:
            with self._switched(True), self._noting_errors(name):
                output = forward_of(module, forward)(*args, **kwargs)
            self._hold_modes(name, module, modes)
            self._charge_chance()
            places = self.places(output)
            self.regions.append(Region(name, start, len(self.nodes), arguments, places))
            end_calls(leaves(places))
        finally:
            self._owners.pop()
        return output

    def _hold_modes(self, name: str, module: nn.Module, modes: dict[str, bool]) -> None:
        """A forward that sets the mode of its parts has to run for it; they keep it after the call."""
        changed = self._modes_set_since(name, module, modes)
        if changed:
            self.problem(name, f"sets the training mode of {changed[0]}")

    def _modes_set_since(self, name: str, module: nn.Module, modes: dict[str, bool]) -> list[str]:
        """The parts of a module whose mode is another than it was, but for those that are known to set it."""
        changed = [full_name(name, path) for path, mode in modes_of(module).items() if modes.get(path, mode) != mode]
        new = [path for path in changed if path not in self._set_modes]
        self._set_modes.update(new)
        return new

    def _call_leaf(self, module: nn.Module, name: str, args: Any, kwargs: Any, forward: Callable[..., Any]) -> Any:
        """A layer is one call."""
        node, known = self._module_node(name, args, kwargs), _versions((args, kwargs))
        real_args, real_kwargs = _plain((args, kwargs))
        if name == "":
            real_args = (module, *real_args)
        value = forward(*real_args, **real_kwargs)
        return self._module_results(node, module, value, known, args, kwargs)

    def _call_island(self, module: nn.Module, name: str, args: Any, kwargs: Any, forward: Callable[..., Any]) -> Any:
        """A module that runs as it is; what it calls is noted."""
        node, known = self._module_node(name, args, kwargs), _versions((args, kwargs))
        objects: dict[int, tuple[Any, Given]] = {}
        containers((args, kwargs), Given(""), objects, lambda leaf: isinstance(leaf, Tensor))
        before = {key: content(value) for key, (value, _) in objects.items()}
        if any(key in self._given for key in objects):
            self.problem(self._owners[-1], f"hands an object of its caller's to {name}, which runs as it is")
        path = full_name(self.path, name)
        real_args, real_kwargs = _plain((args, kwargs))
        with self._writing_itself(module, name):
            value = self.run_inside(path, module, real_args, real_kwargs, forward)
        self.opaque.append(path)
        if any(not same_content(before[key], content(one)) for key, (one, _) in objects.items()):
            self.problem(self._owners[-1], f"hands an object to {name}, which changes it")
        if any(isinstance(leaf, bool) for leaf in leaves(self._opened(value))):
            self.problem(self._owners[-1], f"calls {name}, which gives a bool")
        return self._module_results(node, module, value, known, args, kwargs)

    @contextlib.contextmanager
    def _writing_itself(self, module: nn.Module, name: str) -> Iterator[None]:
        """What an island writes on itself is not the graph's to write: it does so whenever it runs."""
        before, modes = state_of(module), modes_of(module)
        for path, attributes in before.items():
            known = self._state.get(full_name(name, path), {})
            if any(differs(known, attributes, one) for one in {*known, *attributes}):
                self.problem(self._owners[-1], f"writes on {full_name(name, path)} before that runs as it is")
        yield
        self._modes_set_since(name, module, modes)
        for path, attributes in state_of(module).items():
            known = self._state.setdefault(full_name(name, path), {})
            for one in {*attributes, *before.get(path, {})}:
                if differs(before.get(path, {}), attributes, one):
                    known.pop(one, None)
                    known.update({one: attributes[one]} if one in attributes else {})

    def _module_node(self, name: str, args: Any, kwargs: Any) -> Node:
        if self._parameters.are_swapped(attribute(self.root, name)):
            self.problem(self._owners[-1], f"calls {name or 'itself'} with other parameters than its own")
        node = Node(len(self.nodes), "module", name, self.places(args), self.places(kwargs), self._owners[-1])
        node.site = self._sites.get(name, 0)
        self._sites[name] = node.site + 1
        return node

    def _module_results(self, node: Node, module: nn.Module, value: Any, known: Any, args: Any, kwargs: Any) -> Any:
        self._chance.was_drawn_from()  # by a module that runs as it is, and draws again whenever it runs
        changed = [tensor for tensor, version in known if _version(tensor) != version]
        places = (node.args, node.kwargs)
        if changed:
            said = says_it_writes("module", node.target, kwargs, module)
            given = args or tuple(kwargs.values())
            return self._written(node, value, changed, given, GIVEN, said)
        return self._results(node, value, GIVEN, sized_by_values=self._is_sized_by_values(places))

    def run_inside(self, path: str, module: nn.Module, args: Any, kwargs: Any, forward: Callable[..., Any]) -> Any:
        """Run a module as it is, without this mode, noting what it calls and with what."""
        self.called.add(path)
        self.inside.enter(path, module, args, kwargs)
        with self.inside.within(path), self._switched(False), out_of_sight(self):
            return forward(*args, **kwargs)

    def _call_inside(
        self, module: nn.Module, name: str | None, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A module called by an island, or inside of a layer."""
        if self.inside.running is None or name is None:
            return forward(*args, **kwargs)
        path = full_name(self.path, name)
        self.called.add(path)
        return self.inside.call(path, module, forward, args, kwargs)


def _plain(tree: Any) -> Any:
    """Arguments with numbers in place of recorded ones; the same objects where none is there."""
    if any(type(leaf) in NUMBERS for leaf in leaves(tree)):
        return map_leaves(plain, tree)
    return tree


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors have none
        return -1


def _versions(tree: Any) -> list[tuple[Tensor, int]]:
    return [(leaf, _version(leaf)) for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def _by_mask(key: Any) -> bool:
    keys = key if isinstance(key, tuple) else (key,)
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in keys)


def _attributes(root: nn.Module) -> dict[int, Attr]:
    """The places of the tensors that modules hold, by identity; the first name counts."""
    found: dict[int, Attr] = {}
    for attr, tensor in _stored_tensors(root):
        found.setdefault(id(tensor), attr)
    return found


def _stored_tensors(root: nn.Module) -> Iterator[tuple[Attr, Tensor]]:
    for path, module in root.named_modules():
        for store in (module.__dict__.get("_parameters"), module.__dict__.get("_buffers"), module.__dict__):
            for name, value in (store or {}).items():
                if isinstance(value, Tensor):
                    yield Attr(full_name(path, name)), value


def _is_lazy(value: Any) -> bool:
    return hasattr(value, "__next__") or (callable(value) and not isinstance(value, (type, nn.Module, Tensor)))


def _swapped(tree: Any, swap: Callable[[Any], Any], known: Callable[[Any], bool]) -> Any:
    """`tree` with other leaves, where a leaf may be a container."""
    if known(tree):
        return swap(tree)
    kind = type(tree)
    if kind is Instance:
        return Instance(tree.kind, _swapped(tree.attributes, swap, known), _swapped(tree.items, swap, known))
    if kind in (tuple, list):
        return kind(_swapped(item, swap, known) for item in tree)
    if kind is dict:
        return {key: _swapped(value, swap, known) for key, value in tree.items()}
    if issubclass(kind, Mapping) and not isinstance(tree, Tensor):
        with contextlib.suppress(TypeError):
            return kind({key: _swapped(value, swap, known) for key, value in tree.items()})  # type: ignore[call-arg]
    return tree
