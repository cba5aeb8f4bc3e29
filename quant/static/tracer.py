"""The tracer: notes what a forward does, sees through containers, and makes islands of what it cannot keep."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quant.graph import Attr, Graph, Node, Ref, Region, TensorMeta, evaluate, map_leaves
from quant.names import full_name
from quant.static.arguments import Arguments, alike, bind, copied, unbind
from quant.static.attention import forward_of
from quant.static.dead import remove_dead
from quant.static.leaves import is_leaf
from quant.static.patched import patched
from quant.static.traced import Traced, Untraceable
from quant.static.traced_calls import COUNTED, is_shape_call, share_storage, traced_leaves, writes_first_argument


@dataclass
class Capture:
    """What was found of a model.

    Attributes:
        graphs: by dotted name, the modules that are captured each in one graph; '' where the whole model is.
        islands: by dotted name, why a module is none of a graph's.
        called: dotted names of every module that ran.
    """

    graphs: dict[str, Graph] = field(default_factory=dict)
    islands: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)


@dataclass
class Called:
    """A module as an island called it: with what first, whether later calls differ in kind, and what it calls."""

    module: nn.Module
    example: Arguments
    varies: bool = False
    children: list[str] = field(default_factory=list)


class Tracer:
    """Captures one module. `trace` may raise anything that the user's forward does with a value it cannot have."""

    def __init__(self, root: nn.Module, path: str, found: Capture) -> None:
        self.root, self.path, self.found = root, path, found
        self.names = {id(module): name for name, module in root.named_modules()}
        self.attributes = {id(tensor): name for name, tensor in [*root.named_parameters(), *root.named_buffers()]}
        self.nodes: list[Node] = []
        self.values: list[Any] = []
        self.regions: list[Region] = []
        self.opaque: list[str] = []
        self.calls: dict[str, Called] = {}
        self.owners: list[str] = [""]
        self._replaced: dict[int, int] = {}
        self._overwritten: set[int] = set()
        self._sites: dict[str, int] = {}
        self._running: list[str] = []
        self._islands_before = dict(found.islands)
        self._concrete = False

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        """The graph of one call of root."""
        bound = bind(self.root, args, kwargs)
        arguments = {name: self._inputs(name, value) for name, value in bound.items()}
        call_args, call_kwargs = unbind(self.root, arguments)
        with patched(self):
            if is_leaf(self.root):
                output = self.record("module", "", call_args, call_kwargs)
            else:
                output = forward_of(self.root)(*call_args, **call_kwargs)
        self.found.called.add(self.path)
        graph = Graph(self.path, self.nodes, self.places(arguments), self.places(output), self.regions)
        return remove_dead(graph)

    def forget(self) -> None:
        """Drop what was noted of a forward that failed."""
        self.nodes, self.values, self.regions, self.opaque, self.calls = [], [], [], [], {}
        self._forget_islands(self._islands_before)

    def _forget_islands(self, before: dict[str, str]) -> None:
        """Islands inside of an island are looked at again, with what the outer one calls them with."""
        for path in set(self.found.islands) - set(before):
            del self.found.islands[path]
            self.calls.pop(path, None)

    def places(self, tree: Any) -> Any:
        """`tree` with Ref or Attr for what is traced, and for parameters that came by another way."""
        return map_leaves(self._place, tree)

    def _place(self, leaf: Any) -> Any:
        if type(leaf) is not Traced:
            return Attr(self.attributes[id(leaf)]) if id(leaf) in self.attributes else leaf
        if isinstance(leaf._place, Attr):
            return leaf._place
        index = leaf._place.index
        if index in self._overwritten:
            raise Untraceable("reads a tensor after a view of it, or a call that got it, changed it in place")
        while index in self._replaced:
            index = self._replaced[index]
        return Ref(index)

    def _inputs(self, name: str, value: Any) -> Any:
        return map_leaves(lambda leaf: self._input(name, leaf), value)

    def _input(self, name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or id(leaf) in self.attributes:
            return leaf
        return self._append(Node(len(self.nodes), "input", name), leaf.detach().clone(), static=False)

    def _append(self, node: Node, value: Any, static: bool) -> Any:
        if isinstance(value, Tensor):
            node.meta = TensorMeta(tuple(value.shape), value.dtype)
        self.nodes.append(node)
        self.values.append(value)
        return self._wrap(node, value, static)

    def _wrap(self, node: Node, value: Any, static: bool) -> Any:
        if isinstance(value, (Tensor, int, float)):
            return Traced(self, Ref(node.index), value, static and not isinstance(value, Tensor))
        if isinstance(value, (tuple, list)):
            items = [self._item(node, index, item, static) for index, item in enumerate(value)]
            if isinstance(value, torch.Size):
                return tuple(items)
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: self._item(node, key, item, static) for key, item in value.items()}
        return value

    def _item(self, node: Node, key: Any, value: Any, static: bool) -> Any:
        if value is None or isinstance(value, str):
            return value
        item = Node(len(self.nodes), "function", operator.getitem, (Ref(node.index), key), owner=node.owner)
        return self._append(item, value, static)

    def record(self, kind: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a call and make it with the example's values; the result stands for the call's."""
        node = Node(len(self.nodes), kind, target, self.places(args), self.places(kwargs), self.owners[-1])
        static = is_shape_call(kind, target, args, kwargs)
        module = None
        if kind == "module":
            node.site = self._sites.get(target, 0)
            self._sites[target] = node.site + 1
            module = self._module(target)
        writes = writes_first_argument(kind, target, kwargs, module)
        with self._computing(), contextlib.nullcontext() if writes else self._hiding_writes(args, kwargs):
            value = self._compute(node, module)
        if writes and isinstance(value, Tensor):
            self._note_write(args[0] if args else next(iter(kwargs.values())), node.index)
        result = self._append(node, value, static)
        if target in COUNTED or getattr(target, "__name__", "") in COUNTED:
            self.concrete(self.record("function", len, (Traced(self, Ref(node.index), value, True),), {}), "")
        return result

    def _module(self, name: str) -> nn.Module:
        found = self.root.get_submodule(name)
        self.found.called.add(full_name(self.path, name))
        return found

    def _compute(self, node: Node, module: nn.Module | None) -> Any:
        if module is None:
            return evaluate(node, self.root, self.values.__getitem__)
        inner = Node(node.index, "function", type(module).forward, (module, *node.args), node.kwargs)
        return evaluate(inner, self.root, self.values.__getitem__)

    def _note_write(self, changed: Any, index: int) -> None:
        """Later readers of what was written to read the result; readers of its other views cannot be served."""
        if type(changed) is not Traced or isinstance(changed._place, Attr):
            raise Untraceable("changes a parameter or a constant in place")
        place = self._place(changed)
        for other, value in enumerate(self.values):
            resolved = other
            while resolved in self._replaced:
                resolved = self._replaced[resolved]
            if resolved != place.index and share_storage(value, changed._value):
                self._overwritten.add(other)
        self._replaced[place.index] = index

    @contextlib.contextmanager
    def _hiding_writes(self, args: Any, kwargs: Any) -> Iterator[None]:
        """A call that nobody expects to write to what it is given: what it did write to is read by nobody after it."""
        given = [leaf for leaf in traced_leaves((args, kwargs)) if isinstance(leaf._value, Tensor)]
        versions = [leaf._value._version for leaf in given]
        yield
        for leaf, version in zip(given, versions, strict=True):
            if leaf._value._version != version:
                self._overwritten |= {
                    index for index, value in enumerate(self.values) if share_storage(value, leaf._value)
                }

    def concrete(self, traced: Traced, what: str) -> Any:
        """The number behind `traced`, guarded so that a run with another one is refused."""
        if isinstance(traced._value, Tensor) or not traced._static:
            raise Untraceable(f"{what} a tensor's values")
        node = Node(len(self.nodes), "guard", "guard", (self._place(traced), traced._value), owner=self.owners[-1])
        self._append(node, traced._value, static=True)
        return traced._value

    def attribute(self, value: Tensor) -> Any:
        """What the user's forward reads instead of a parameter or buffer."""
        if self._concrete or id(value) not in self.attributes:
            return value
        return Traced(self, Attr(self.attributes[id(value)]), value, static=False)

    def call(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What happens instead of `module(*args, **kwargs)`."""
        if self._concrete:
            return self._call_concretely(module, args, kwargs)
        name = self.names.get(id(module))
        if name is None:
            if next(module.parameters(), None) is not None:
                raise Untraceable(f"calls a {type(module).__name__} that is not one of its submodules")
            return module.forward(*args, **kwargs)
        self.found.called.add(full_name(self.path, name))
        return self.record("module", name, args, kwargs) if is_leaf(module) else self._enter(module, name, args, kwargs)

    def _enter(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        """See through a container, or make it an island and undo what was noted of it."""
        start = len(self.nodes)
        saved = dict(self._replaced), set(self._overwritten), dict(self._sites), len(self.regions), len(self.opaque)
        islands = dict(self.found.islands)
        arguments = {key: self.places(value) for key, value in bind(module, args, kwargs).items()}
        self.owners.append(name)
        try:
            output = forward_of(module)(*args, **kwargs)
            region = Region(name, start, len(self.nodes), arguments, self.places(output))
        except Exception as error:
            self.owners.pop()
            self._replaced, self._overwritten, self._sites = saved[0], saved[1], saved[2]
            del self.nodes[start:], self.values[start:], self.regions[saved[3] :], self.opaque[saved[4] :]
            self._forget_islands(islands)
            return self._island(module, name, args, kwargs, error)
        self.owners.pop()
        self.regions.append(region)
        return output

    def _island(self, module: nn.Module, name: str, args: Any, kwargs: Any, error: Exception) -> Any:
        if traced_leaves((args, kwargs)) == []:
            raise error
        node = Node(len(self.nodes), "module", name, self.places(args), self.places(kwargs), self.owners[-1])
        node.site = self._sites.get(name, 0)
        self._sites[name] = node.site + 1
        real_args, real_kwargs = map_leaves(_value_of, (args, kwargs))
        with self._hiding_writes(args, kwargs):
            value = self.run_island(full_name(self.path, name), module, real_args, real_kwargs, error)
        self.opaque.append(full_name(self.path, name))
        return self._append(node, value, static=False)

    def run_island(self, path: str, module: nn.Module, args: Any, kwargs: Any, error: Exception) -> Any:
        """Run a module that cannot be seen through, noting what it calls and with what."""
        said = str(error).splitlines()
        reason = (
            said[0] if isinstance(error, Untraceable) else f"raised {type(error).__name__}: {said[0] if said else ''}"
        )
        self.found.islands[path] = f"its forward {reason}"
        self.found.called.add(path)
        call = self.calls.setdefault(path, Called(module, (copied(args), copied(kwargs))))
        call.children = []
        self._running.append(path)
        try:
            with patched(self), self._computing():
                return type(module).forward(module, *args, **kwargs)
        finally:
            self._running.pop()

    def _call_concretely(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        name = self.names.get(id(module))
        if not self._running or name is None:
            return module.forward(*args, **kwargs)
        path = full_name(self.path, name)
        self.found.called.add(path)
        parent = self.calls[self._running[-1]]
        if path not in parent.children:
            parent.children.append(path)
        if path not in self.calls:
            self.calls[path] = Called(module, (copied(args), copied(kwargs)))
        elif not self.calls[path].varies:
            self.calls[path].varies = not alike(module, self.calls[path].example, (args, kwargs))
        self._running.append(path)
        try:
            return module.forward(*args, **kwargs)
        finally:
            self._running.pop()

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        before, self._concrete = self._concrete, True
        try:
            yield
        finally:
            self._concrete = before


def _value_of(leaf: Any) -> Any:
    return leaf._value if type(leaf) is Traced else leaf
