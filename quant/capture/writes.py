"""Writes of a forward: to tensors in place, to attributes of modules, and to objects of its caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.capture.call_results import CallResults
from quant.capture.calls import share_storage
from quant.capture.module_state import ChangedClass, Items, ModuleState, address_of
from quant.capture.places import MISSING
from quant.capture.sameness import same, same_content
from quant.capture.scripted import ScriptState
from quant.capture.snapshot import state_of, storages_of, users_modules
from quant.capture.tape import Tape
from quant.graph import Kind, Node, written_arguments
from quant.leaves import is_leaf
from quant.runtime.calls import with_items, write_items
from quant.runtime.names import full_name
from quant.runtime.objects import Write, content
from quant.runtime.trees import Ref, leaves


class Writes:
    """Notes writes on a tape, and returns at the end those that outlive the call."""

    def __init__(self, tape: Tape, results: CallResults) -> None:
        self.tape, self.results = tape, results
        self._state: dict[str, ModuleState | ScriptState] = {}
        self._stored: dict[int, torch.UntypedStorage] = {}
        self._parameters: dict[int, list[str]] = {}
        self._set: set[int] = set()
        self._contents: dict[int, Any] = {}
        self._given_at: list[tuple[Tensor, int]] = []

    def begin(self) -> None:
        """Note the state before the call."""
        self._contents = {key: content(value) for key, (value, _) in self.tape.given.items()}
        self._given_at = [(tensor, address_of(tensor)) for tensor in self.tape.inputs]
        self._state, self._stored = dict(self.tape.parts), storages_of(self.tape.parts.values())
        self._parameters = {}
        for name, parameter in self.tape.root.named_parameters(remove_duplicate=False):
            if parameter.layout == torch.strided and address_of(parameter):
                self._parameters.setdefault(parameter.untyped_storage().data_ptr(), []).append(name)

    def set_items(self, args: tuple[Any, ...], places: tuple[Any, Any]) -> None:
        """x[key] = value: a copy with other items; or x itself where the write outlives the call."""
        x, outlives = args[0], self._outlives(args[0])
        target = write_items if outlives else with_items
        node = Node(len(self.tape.nodes), Kind.FUNCTION, target, places[0], owner=self.tape.owner, writes=outlives)
        self._overwrite([x], keep=x)
        self.tape.append(node, x, self.tape.follows_from(places))

    def written(
        self, node: Node, value: Any, changed: list[Tensor], args: tuple[Any, ...], follows: int, in_place: bool
    ) -> Any:
        """Note a call that changed tensors: later readers of its first argument read its result."""
        first = args[0] if args else next(iter(node.kwargs.values()), None)
        self._refuse_parameters(changed)
        alone = all(tensor is first for tensor in changed)
        node.writes = any(self._outlives(tensor) for tensor in changed)
        if not (alone and in_place and isinstance(value, Tensor) and (value is first or share_storage(value, first))):
            self._overwrite(changed, keep=None)
            return self.results.note(node, value, follows)
        self._overwrite(changed, keep=first)
        index = self.tape.append(node, first, follows)
        if value is not first and isinstance(value, Tensor):
            self.tape.know(value, Ref(index))
        return value

    def note_statistics(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a batch norm by the batch updates its running statistics, of which their versions tell nothing."""
        if node.target is not F.batch_norm:
            self.tape.problem(self.tape.owner, "updates the statistics of a batch norm by a call of its own")
            return
        given = Node(node.index, node.kind, node.target, args, kwargs)
        statistics = [one for one in written_arguments(given) if isinstance(one, Tensor)]
        node.writes = bool(statistics)
        for one in statistics:
            self._overwrite([one], keep=one)

    def set_data(self, tensor: Tensor) -> None:
        """tensor.data = another: a tensor of the model's makes an island of whoever sets it."""
        place = self.tape.attributes.get(id(tensor))
        if place is not None:
            self._set.add(id(tensor))
            self.tape.problem(self.tape.owner, f"gives its tensor '{place.path}' other memory")

    def _refuse_parameters(self, changed: list[Tensor]) -> None:
        """Make an island of what changes parameters, by themselves, by views or by their `.data`: layers hold them in
        integers, and torch may not count such a change."""
        for tensor in changed:
            names = self._parameters.get(tensor.untyped_storage().data_ptr(), ()) if tensor.numel() else ()
            if names:
                self.tape.problem(self.tape.owner, "changes a parameter")
                self.tape.changed.update(full_name(self.tape.path, name) for name in names)

    def _overwrite(self, changed: list[Tensor], keep: Any) -> None:
        """Note that tensors sharing memory with changed ones cannot be read by their old places any more."""
        if keep is not None and self.tape.given_back.holds(keep):
            # With another layout or dtype of the inputs, the call would have returned a copy.
            self.tape.typed = self.tape.contiguous = True
            if not all(tensor.is_contiguous() for tensor in self.tape.inputs if tensor.layout == torch.strided):
                self.tape.problem(self.tape.owner, "writes to a tensor that a call gave back as it is")
        for tensor in changed:
            place = self.tape.where.get(id(tensor))
            own = place.index if tensor is keep and isinstance(place, Ref) else None
            indices = self.tape.by_storage.get(tensor.untyped_storage().data_ptr(), []) if tensor.numel() else []
            for index in indices:
                # Readers of the tensor itself find its new node by id.
                if index != own and self.tape.value(index) is not keep:
                    self.tape.overwritten.add(index)
            if self._stores(tensor) and tensor is not keep:
                self.tape.problem(self.tape.owner, "changes a parameter or a buffer in place")

    def _stores(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with a parameter or buffer, as of the beginning of the call."""
        if tensor.numel() == 0:
            return False
        return tensor.untyped_storage().data_ptr() in self._stored

    def _outlives(self, tensor: Any) -> bool:
        """Whether a write to a tensor outlives the call: it shares memory with an input, parameter or buffer."""
        return any(share_storage(tensor, one) for one in self.tape.inputs) or self._stores(tensor)

    def refuse_other_memory(self) -> None:
        """Make an island of what gives a tensor of the model's, or of the caller's, other memory.

        Torch tells function modes nothing of `Tensor.set_`. A layer of torch does not do that by itself, so of its
        callers the outermost is taken, whose island calls all of them.
        """
        for path, part in self._state.items():
            moved = part.moved() if isinstance(part, ModuleState) else ()
            for name in (one for one in moved if id(dict(part.tensors)[one]) not in self._set):
                full = f"{full_name(self.tape.path, path)}."
                if not any(full.startswith(f"{island}.") for island in self.tape.islands):
                    does = "" if is_leaf(part.module) else path
                    self.tape.problem(does, f"gives its tensor '{full_name(path, name)}' other memory")
        if any(address_of(tensor) != place for tensor, place in self._given_at):
            self.tape.problem("", "gives an argument other memory")

    def of_arguments(self) -> Iterator[Write]:
        """The writes to objects of the caller's."""
        for key, (value, given) in list(self.tape.given.items()):
            if not same_content(self._contents[key], content(value)):
                attributes, items = content(value)
                yield Write(given, (self.tape.places(attributes, own=True), self.tape.places(items, own=True)))

    def of_attributes(self) -> Iterator[Write]:
        """The writes to attributes of modules; a new submodule is a write to its parent."""
        for path, part in self._state.items():
            for name, value in sorted(self._written(part).items()):
                if isinstance(value, ChangedClass):
                    self.tape.problem(path, "changes its class")
                elif value is MISSING or isinstance(value, (nn.Module, nn.Parameter, Items)):
                    self.tape.problem(path, f"changes its attribute '{name}'")
                else:
                    yield Write(full_name(path, name), self.tape.places(value))

    def _written(self, part: ModuleState | ScriptState) -> dict[str, Any]:
        """The attributes set on a module, by name; those of a script module are not known."""
        if isinstance(part, ScriptState):
            return {}
        # A number that depends on this call's sizes was set, though its value may be the same.
        return {
            name: now
            for name, (before, now) in part.replaced().items()
            if not same(before, now) or self.tape.is_own_number(now)
        }

    @contextlib.contextmanager
    def of_island(self, module: nn.Module, name: str) -> Iterator[None]:
        """While an island runs: its writes on itself are not the graph's, since it repeats them whenever it runs."""
        for path in (full_name(name, inner) for inner, _ in users_modules(module)):
            if path not in self._state or self._written(self._state[path]):
                self.tape.problem(self.tape.owner, f"writes on {path} before that runs as it is")
        yield
        for inner, part in users_modules(module):
            path = full_name(name, inner)
            if path not in self._state or self._written(self._state[path]):
                self._state[path] = state_of(part)


def version_of(tensor: Tensor) -> int:
    """The number of times that a tensor was changed in place."""
    try:
        return tensor._version
    except RuntimeError:  # inference tensors have none
        return -1


def versions(tree: Any) -> list[tuple[Tensor, int]]:
    """The tensors in a tree, with the version of each."""
    return [(leaf, version_of(leaf)) for leaf in leaves(tree) if isinstance(leaf, Tensor)]
