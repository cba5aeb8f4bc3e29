"""The recorder: runs a module on real tensors, and notes its calls as a graph.

A function mode of torch reports calls of torch (`TorchFunctionMode`, `function_calls.py`), and watched submodules
report theirs (`recorded_modules.py`, `module_calls.py`). The innermost module that takes values out of torch is noted
as an island; the run goes on with the right values, so that one run shows all such modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quant.capture.attention import forward_of
from quant.capture.call_results import CallResults
from quant.capture.fatal_sizes import refuse_fatal
from quant.capture.forward_code import named_in
from quant.capture.function_calls import FunctionCalls
from quant.capture.module_calls import ModuleCalls, modes_of
from quant.capture.numbers import NUMBERS, plain_numbers, recorded
from quant.capture.scalars import NUMBER, Limit, with_numbers
from quant.capture.snapshot import Snapshot
from quant.capture.tape import GIVEN, Tape
from quant.capture.unrecordable import asked, said_of, stand_ins
from quant.capture.writes import Writes, versions
from quant.dead_calls import remove_dead
from quant.graph import Graph, Kind, Node
from quant.leaves import is_leaf
from quant.runtime.arguments import bind, copyable, kept
from quant.runtime.objects import OPAQUE, Given, Result, containers, holds_objects
from quant.runtime.trees import Ref, leaves, map_leaves


class Recorder(Tape, TorchFunctionMode):
    """Records one call of a module.

    Attributes:
        training: whether the graph is to be trained.
        tries: whether the call's sizes are not those of a call of the user's; set by the caller.
        tensors: those of the call, in the order of `tensors_in`; set by the caller where limits need them.
        numbers: those of the call, in the order of `scalars.with_numbers`.
        arguments: those of the call, by name.
        expected: the arguments, nested, with a Ref in the place of each tensor and number.
        output: nested, with Ref; set by `run`.
        result: what the module returned.
    """

    def __init__(
        self,
        root: nn.Module,
        path: str,
        islands: Mapping[str, str],
        limits: tuple[Limit, ...],
        before: Snapshot,
        *,
        training: bool = False,
        keeps: bool = False,
    ) -> None:
        Tape.__init__(self, root, path, islands, limits, before, keeps=keeps)
        TorchFunctionMode.__init__(self)
        self.training = training
        self.tries = False
        self.tensors: list[Tensor] = []
        self.numbers: list[int | float] = []
        self.arguments: dict[str, Any] = {}
        self.expected: dict[str, Any] = {}
        self.output: Any = None
        self.result: Any = None
        results = CallResults(self)
        self._writes = Writes(self, results)
        self._functions = FunctionCalls(self, results, self._writes, training=training, until=Recorder.run.__code__)
        self._modules = ModuleCalls(self, results, self._writes, self)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the root and record the call."""
        args, kwargs = with_numbers(self.root, (args, kwargs), self._number_input)
        self._take_arguments(args, kwargs)
        for name, value in self.arguments.items():
            containers(value, Given(name), self.given, lambda leaf: isinstance(leaf, Tensor))
        self._hold_sizes()
        self._writes.begin()
        with self:
            if is_leaf(self.root):
                self.result = self._modules.call_leaf(self.root, "", args, kwargs, type(self.root).forward)
            else:
                self.held_for_texts((args, kwargs))
                modes = modes_of(self.root)
                with self.lines.counting(), self.switched(True), self._modules.noting_errors(""):
                    self.result = forward_of(self.root, self.root.forward)(*args, **kwargs)
                self._modules.hold_modes("", modes)
            self._end()
        self.called.add(self.path)

    def again(self, before: Snapshot, *, training: bool, keeps: bool = False) -> Recorder:
        """A recorder of another call of the same kind, on a model that now holds `before`."""
        return Recorder(self.root, self.path, self.islands, self.limits, before, training=training, keeps=keeps)

    def forget_values(self) -> None:
        """Release all tensors of the call; with gradients each keeps all earlier ones alive."""
        self.forget()
        self.result, self.tensors, self.arguments = None, [], {}

    def take_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Any]:
        """The tensors and numbers of a call, by their input nodes."""
        self._take_arguments(*with_numbers(self.root, (args, kwargs), self._number_input))
        return {node.index: self.value(node.index) for node in self.nodes}

    def _take_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments = bind(self.root, args, kwargs)
        self.expected = {name: self._take(name, value) for name, value in self.arguments.items()}

    def _take(self, name: str, value: Any) -> Any:
        return map_leaves(lambda leaf: self._input(name, leaf), self.opened(value))

    def _input(self, name: str, leaf: Any) -> Any:
        if type(leaf) in NUMBERS:
            return Ref(leaf.index)
        if not isinstance(leaf, Tensor):
            return kept(leaf)  # a copy: the forward may change the argument
        if id(leaf) in self.attributes:
            return self.place(leaf)
        if id(leaf) in self.where:
            return self.where[id(leaf)]
        asked = named_in(self.root, leaf.__dict__.keys())  # torch sets attributes on tensors that it has exported, too
        if asked:
            self.problem("", f"gets a tensor with an attribute '{asked}' of the caller's")
        self.inputs.append(leaf)
        index = self.append(Node(len(self.nodes), Kind.INPUT, name), leaf, GIVEN)
        return Ref(index)

    def _number_input(self, name: str, value: Any) -> Any:
        """Make a number of the caller's an input of the graph, unless it is held to its value."""
        self.numbers.append(value)
        if Limit(len(self.numbers) - 1, NUMBER) in self.limits:
            return value
        node = Node(len(self.nodes), Kind.INPUT, name, number=type(value))
        index = self.append(node, value, GIVEN)
        if type(value) is int:
            self.sizes[index] = index
        return recorded(value, self, index, True)

    def _hold_sizes(self) -> None:
        for limit in self.limits:
            if limit.dim < 0:
                continue
            tensor = self.tensors[limit.place]
            node = Node(len(self.nodes), Kind.METHOD, "size", (self.where[id(tensor)], limit.dim))
            index = self.append(node, tensor.shape[limit.dim], GIVEN)
            self.guard(Ref(index), tensor.shape[limit.dim])

    def graph(self) -> Graph:
        """The graph of the recording, without calls whose values are not needed."""
        asked = {"typed": self.typed, "ranked": self.ranked, "contiguous": self.contiguous}
        return remove_dead(Graph(self.path, self.nodes, self.expected, self.output, self.spans, **asked))

    def _end(self) -> None:
        value = self._output_places(self.result)
        self._writes.refuse_other_memory()
        writes = [*self._writes.of_arguments(), *self._writes.of_attributes()]
        self.drop_needless_guards((value, writes))
        self._modules.island_results.refuse_later_guards()
        self.output = Result(value, tuple(writes)) if writes or holds_objects(value) else value
        self.keep(self.output)

    def _output_places(self, result: Any) -> Any:
        for leaf in leaves(self.opened(result)):
            if _is_lazy(leaf):
                self.problem("", f"returns a {type(leaf).__name__}, which runs after the call")
            elif not isinstance(leaf, OPAQUE) and not copyable(leaf):
                self.problem("", f"returns an object that holds a {type(leaf).__name__}, which cannot be copied")
            elif isinstance(leaf, Tensor) and id(leaf) in self.where and leaf.__dict__:
                own = named_in(self.root, leaf.__dict__.keys())
                if own:
                    self.problem("", f"returns a tensor with an attribute '{own}'")
        return self.places(result, own=True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.tries:
            refuse_fatal(func, args, kwargs)
        if not self.is_recording or self.inside.is_elsewhere:
            return func(*args, **kwargs)
        strangers = stand_ins(types, (args, kwargs))
        if strangers:
            with self:  # the calls that they make are recorded
                return asked(strangers, func, types, args, kwargs)
        with self.switched(False):
            real_args, real_kwargs = plain_numbers((args, kwargs))
            known = versions((real_args, real_kwargs))
            value = func(*real_args, **real_kwargs)
            try:
                return self._functions.note(func, args, kwargs, value, known)
            except Exception as error:  # of tensors that torch itself cannot be asked about
                name = getattr(func, "__name__", str(func))
                self.problem(self.owner, f"calls {name}, which cannot be followed: {said_of(error)}")
                return value

    def on_copy(self, module: nn.Module) -> None:
        """A forward copies a module."""
        self._modules.on_copy(module)

    def on_call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a submodule in place of its forward, and note the call."""
        return self._modules.on_call(module, forward, args, kwargs)

    def run_inside(self, path: str, module: nn.Module, args: Any, kwargs: Any, forward: Callable[..., Any]) -> Any:
        """Run a module's own forward without this mode, noting the modules that it calls."""
        return self._modules.run_inside(path, module, args, kwargs, forward)


def _is_lazy(value: Any) -> bool:
    return hasattr(value, "__next__") or (callable(value) and not isinstance(value, (type, nn.Module, Tensor)))
