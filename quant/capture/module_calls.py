"""Notes the calls of watched modules: layers, islands, and containers that are seen through."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quant.capture.attention import forward_of
from quant.capture.call_results import CallResults
from quant.capture.calls import says_it_writes
from quant.capture.changing_hooks import ForwardWithHooks
from quant.capture.island_results import IslandResults
from quant.capture.numbers import plain_numbers
from quant.capture.packed_calls import check_packed
from quant.capture.random_draws import Chance
from quant.capture.sameness import same_content
from quant.capture.tape import GIVEN, Tape
from quant.capture.unrecordable import out_of_sight
from quant.capture.writes import Writes, version_of, versions
from quant.graph import Kind, Node, Span
from quant.leaves import is_leaf
from quant.runtime.arguments import bind
from quant.runtime.names import attribute, full_name
from quant.runtime.objects import Given, containers, content
from quant.runtime.trees import leaves

Modes = list[tuple[str, nn.Module, bool]]
"""Dotted name -> whether the module is in training mode."""


class ModuleCalls:
    """Notes calls of modules on a tape.

    Args:
        mode: the function mode that records; islands run without it.
    """

    def __init__(self, tape: Tape, results: CallResults, writes: Writes, mode: TorchFunctionMode) -> None:
        self.tape, self.results, self.writes, self.mode = tape, results, writes, mode
        self._chance = Chance(tape.before.generators)
        self.island_results = IslandResults(tape)
        self._sites: dict[str, int] = {}
        self._set_modes: set[str] = set()

    def on_copy(self, module: nn.Module) -> None:
        """A forward copies a module: note it, since after conversion the copy would be of an int8 layer."""
        name = self.tape.names.get(id(module))
        if name is not None and not self.tape.inside.is_elsewhere:
            self.tape.problem(self.tape.owner, f"copies {name or 'itself'}")
            self.tape.problem(name, "is copied by another")

    def on_call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a submodule in place of its forward, and note the call."""
        name = self.tape.names.get(id(module))
        if self.tape.inside.is_elsewhere:
            return self._call_elsewhere(module, name, forward, args, kwargs)
        seen_through = (
            self.tape.is_recording and name is not None and full_name(self.tape.path, name) not in self.tape.islands
        )
        if self.tape.is_recording and not _is_torch_layer(module):
            self.charge_chance()
        with self.tape.switched(False):  # what is asked of a tensor in a global is asked by us
            self.tape.outside.enter(module, forward)
        try:
            return self._call(module, name, forward, args, kwargs)
        finally:
            with self.tape.switched(False):
                label = self.tape.outside.leave()
            if label and seen_through:
                self.tape.problem(str(name), f"changes '{label}', which is outside of the model")

    def _call_elsewhere(
        self, module: nn.Module, name: str | None, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """A module called in another thread."""
        self.tape.is_threaded = True
        if self.tape.inside.running is None:
            self.tape.problem(self.tape.owner, "calls modules in another thread")
            return forward(*args, **kwargs)
        return self._call_inside(module, name, forward, args, kwargs)

    def _call(
        self, module: nn.Module, name: str | None, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if not self.tape.is_recording:
            check_packed(module, args, kwargs)
            return self._call_inside(module, name, forward, args, kwargs)
        if name is None or module is self.tape.root:
            output = forward(*args, **kwargs)
            self.charge_chance()
            return output
        path = full_name(self.tape.path, name)
        self.tape.called.add(path)
        with self.tape.switched(False):
            if path in self.tape.islands:
                return self._call_island(module, name, args, kwargs, forward)
            if is_leaf(module) or isinstance(module, torch.jit.ScriptModule):
                return self.call_leaf(module, name, args, kwargs, forward)
            return self._enter(module, name, forward, args, kwargs)

    def _enter(self, module: nn.Module, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See through a container."""
        start, end_calls = len(self.tape.nodes), self.tape.given_back.mark()
        arguments = {key: self.tape.places(value) for key, value in bind(module, args, kwargs).items()}
        self.tape.owners.append(name)
        self.tape.held_for_texts((args, kwargs))
        modes = modes_of(module)
        try:
            with self.tape.switched(True), self.noting_errors(name):
                output = forward_of(module, forward)(*args, **kwargs)
            self.hold_modes(name, modes)
            self.charge_chance()
            places = self.tape.places(output)
            hooked = isinstance(forward, ForwardWithHooks)
            self.tape.spans.append(Span(name, start, len(self.tape.nodes), arguments, places, hooked))
            end_calls(leaves(places))
        finally:
            self.tape.owners.pop()
        return output

    def hold_modes(self, name: str, modes: Modes) -> None:
        """Make an island of a forward that sets the mode of its parts, which they keep after the call."""
        changed = self._modes_set_since(name, modes)
        if changed:
            self.tape.problem(name, f"sets the training mode of {changed[0]}")

    def _modes_set_since(self, name: str, modes: Modes) -> list[str]:
        """The parts of a module whose mode has changed, except those noted already."""
        changed = [full_name(name, path) for path, part, mode in modes if part.training != mode]
        new = [path for path in changed if path not in self._set_modes]
        self._set_modes.update(new)
        return new

    def call_leaf(self, module: nn.Module, name: str, args: Any, kwargs: Any, forward: Callable[..., Any]) -> Any:
        """Call a layer, which is one node."""
        node, known = self._module_node(name, args, kwargs), versions((args, kwargs))
        real_args, real_kwargs = plain_numbers((args, kwargs))
        check_packed(module, real_args, real_kwargs)
        if not name:
            real_args = (module, *real_args)
        value = forward(*real_args, **real_kwargs)
        return self._results(node, module, value, known, args, kwargs)

    def _call_island(self, module: nn.Module, name: str, args: Any, kwargs: Any, forward: Callable[..., Any]) -> Any:
        """Call an island, which is one node, and note the modules that it calls."""
        if isinstance(forward, ForwardWithHooks) and forward.of_layer:
            self.tape.problem(self.tape.owner, f"calls {name}, a layer with a forward hook that has to run")
        node, known = self._module_node(name, args, kwargs), versions((args, kwargs))
        objects: dict[int, tuple[Any, Given]] = {}
        containers((args, kwargs), Given(""), objects, lambda leaf: isinstance(leaf, Tensor))
        before = {key: content(value) for key, (value, _) in objects.items()}
        if any(key in self.tape.given for key in objects):
            self.tape.problem(self.tape.owner, f"hands an object of its caller's to {name}, which runs as it is")
        path = full_name(self.tape.path, name)
        real_args, real_kwargs = plain_numbers((args, kwargs))
        modes, state = modes_of(module), self.island_results.state_of(module, name)
        with self.writes.of_island(module, name):
            value = self.run_inside(path, module, real_args, real_kwargs, forward)
        self._modes_set_since(name, modes)
        self.tape.opaque.append(path)
        if any(not same_content(before[key], content(one)) for key, (one, _) in objects.items()):
            self.tape.problem(self.tape.owner, f"hands an object to {name}, which changes it")
        self.island_results.note_state(node, name, state)
        return self._results(node, module, value, known, args, kwargs, holds=name)

    def _module_node(self, name: str, args: Any, kwargs: Any) -> Node:
        if self.tape.before.are_swapped(attribute(self.tape.root, name)):
            self.tape.problem(self.tape.owner, f"calls {name or 'itself'} with other parameters than its own")
        node = Node(
            len(self.tape.nodes), Kind.MODULE, name, self.tape.places(args), self.tape.places(kwargs), self.tape.owner
        )
        once = next((leaf for leaf in leaves((node.args, node.kwargs)) if hasattr(leaf, "__next__")), None)
        if once is not None:  # a run of the graph would find it read to its end
            self.tape.problem(self.tape.owner, f"hands a {type(once).__name__} to {name or 'itself'}")
        node.site = self._sites.get(name, 0)
        self._sites[name] = node.site + 1
        return node

    def _results(
        self, node: Node, module: nn.Module, value: Any, known: Any, args: Any, kwargs: Any, holds: str = ""
    ) -> Any:
        """Note the results of a call; `holds` is the name of an island, whose output is guarded."""
        if not _is_torch_layer(module):
            self._chance.was_drawn_from()  # by a module that runs as it is, and draws again whenever it runs
        changed = [tensor for tensor, version in known if version_of(tensor) != version]
        places = (node.args, node.kwargs)
        if changed:
            in_place = says_it_writes(Kind.MODULE, node.target, kwargs, module)
            arguments = args or tuple(kwargs.values())
            return self.writes.written(node, value, changed, arguments, GIVEN, in_place)
        by_values = self.tape.is_sized_by_values(places)
        hold = (lambda: self.island_results.hold(node, holds, value)) if holds else None
        return self.results.note(node, value, GIVEN, sized_by_values=by_values, hold=hold)

    def run_inside(self, path: str, module: nn.Module, args: Any, kwargs: Any, forward: Callable[..., Any]) -> Any:
        """Run a module's own forward without the recording mode, noting the modules that it calls."""
        self.tape.called.add(path)
        self.tape.inside.enter(path, module, args, kwargs)
        with self.tape.inside.within(path), self.tape.switched(False), out_of_sight(self.mode):
            return forward(*args, **kwargs)

    def _call_inside(
        self, module: nn.Module, name: str | None, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A module called by an island, or inside of a layer."""
        if self.tape.inside.running is None or name is None:
            return forward(*args, **kwargs)
        path = full_name(self.tape.path, name)
        self.tape.called.add(path)
        return self.tape.inside.call(path, module, forward, args, kwargs)

    @contextlib.contextmanager
    def noting_errors(self, name: str) -> Iterator[None]:
        """Note the innermost module whose forward raises an error."""
        try:
            yield
        except Exception as error:
            if self.tape.failed is None or self.tape.failed[1] is not error:
                self.tape.failed = full_name(self.tape.path, name), error
            raise

    def charge_chance(self) -> None:
        """Attribute the random numbers drawn since the last call of a submodule to the running module."""
        if self._chance.was_drawn_from():
            self.tape.problem(self.tape.owner, "draws random numbers outside of torch")


def _is_torch_layer(module: nn.Module) -> bool:
    """Whether a call of the module runs torch's code only, which draws from torch's generators only."""
    return type(module).__module__.startswith("torch.nn.modules.") and is_leaf(module)


def modes_of(root: nn.Module) -> Modes:
    """The modes of all modules within `root`."""
    return [(path, module, module.training) for path, module in root.named_modules()]
