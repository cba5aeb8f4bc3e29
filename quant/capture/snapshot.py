"""The state of a model, and of the places that its forwards reach, to compare with a later one and to restore.

Every recording needs one, to find the writes of a forward and to undo them. A snapshot reuses the parts of the one
before it whose modules have not changed, so the recordings of a module without writes share one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from quant.capture.module_state import ModuleState
from quant.capture.outer_objects import Outside
from quant.capture.places import Checked, Places
from quant.capture.random_draws import Drawn
from quant.capture.scripted import ScriptState
from quant.runtime.names import full_name
from quant.runtime.programs import RESERVED


class Snapshot:
    """The state of a model and its surroundings at one moment, random generators included.

    Args:
        outside: the places outside of the model that its forwards reach.
        last: an earlier snapshot, whose parts are reused where they are unchanged.

    Attributes:
        parts: the state of each module, by its dotted name.
    """

    def __init__(self, model: nn.Module, outside: Outside, last: Snapshot | None = None) -> None:
        checked = Checked()
        self.outside = outside
        self._places: Places = Places({} if last is None else last._places.held, checked)
        known: dict[int, ModuleState | ScriptState] = {} if last is None else last._by_module
        self.parts: dict[str, ModuleState | ScriptState] = {}
        self._modes: list[tuple[nn.Module, bool]] = []
        for name, module in users_modules(model):
            part = known.get(id(module))
            if part is None or not part.is_as_before(checked):
                part = state_of(module, self._places)
            self._places.keep(held for _, held in part.held)
            self.parts[name] = part
            self._modes.append((module, module.training))
        self._by_module: dict[int, ModuleState | ScriptState] = {id(part.module): part for part in self.parts.values()}
        self._reached = {key: self._places.of(held.place) for key, held in outside.first.items()}
        self.generators = [one for part in self.parts.values() for one in part.generators]
        self._drawn = Drawn(self.generators)

    def within(self, root: nn.Module) -> dict[str, ModuleState | ScriptState]:
        """The states of the modules within `root`, by their names in it."""
        first = self.parts[""]
        if root is first.module:
            return self.parts
        return {name: self._by_module[id(module)] for name, module in users_modules(root)}

    def are_swapped(self, module: nn.Module) -> bool:
        """Whether parameters of a module, or of one within it, were replaced."""
        if isinstance(module, torch.jit.ScriptModule):
            return False
        inside = module.modules() if module._modules else (module,)
        parts = map(self._by_module.get, map(id, inside))
        return not all(part.has_own_parameters() for part in parts if isinstance(part, ModuleState))

    def put_back(self) -> set[str]:
        """Restore everything, places reached since included.

        Returns:
            the dotted names of the modules' attributes and tensors that had changed.
        """
        checked = Checked()
        changed = {full_name(name, key) for name, part in self.parts.items() for key in part.put_back(checked)}
        for module, mode in self._modes:
            if module.training is not mode:  # to set an attribute of a module takes ten times as long
                module.training = mode
        for held in {**self.outside.first, **self._reached}.values():
            if not checked.is_as_before(held):
                held.put_back()
        self._drawn.put_back()
        return changed


def users_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model, but for runners and observers, which no forward of the user's changes."""
    return ((name, module) for name, module in model.named_modules() if RESERVED not in name.split("."))


def snapshot(model: nn.Module, last: Snapshot | None = None) -> Snapshot:
    """What a model holds now, without what its forwards reach outside of it; `last` as of `Snapshot`."""
    return Snapshot(model, Outside(), last)


@contextlib.contextmanager
def holding(before: Snapshot | None, model: nn.Module) -> Iterator[None]:
    """Let a model hold what it held before, within the context; None changes nothing."""
    if before is None:
        yield
        return
    now = snapshot(model, before)
    before.put_back()
    try:
        yield
    finally:
        now.put_back()


def state_of(module: nn.Module, places: Places | None = None) -> ModuleState | ScriptState:
    """The current state of one module."""
    if isinstance(module, torch.jit.ScriptModule):
        return ScriptState(module)
    return ModuleState(module, places or Places({}, Checked()))


def storages_of(parts: Iterable[ModuleState | ScriptState]) -> dict[int, torch.UntypedStorage]:
    """The storages of the tensors that modules hold, by address.

    Tensors that a forward sets during the call are not among them: until it ends they are values like others.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for part in parts:
        for _, tensor in part.tensors:
            # Sparse tensors, and tensors without a shape yet, have none.
            with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage
    storages.pop(0, None)  # empty tensors
    return storages
