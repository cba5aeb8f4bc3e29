"""The state of one module at one moment, to compare with a later one and to restore."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from quant.capture.places import MISSING, Checked, Content, Held, Place, Places, contents_of, items_of_container
from quant.capture.random_draws import GENERATORS
from quant.capture.sameness import all_same, flat
from quant.runtime.arguments import copyable
from quant.runtime.objects import OPAQUE, attributes_of
from quant.runtime.programs import RESERVED

STORES = ("_parameters", "_buffers", "_modules")
CLASS = "__class__"
"""The attribute by which an object changes its class."""
OURS = {"forward", "training"}
"""Attributes that capture itself sets; restoring them is not a change of the model."""
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}
"""Attributes of every module, among them a dozen tables of hooks, nearly always empty."""
VALUES = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
"""Classes of immutable values."""
EMPTY = frozenset({list, dict, set, OrderedDict})
"""Containers with no state to keep while they are empty."""


@dataclass(frozen=True)
class ChangedClass:
    """A module's new class, where it has changed."""

    kind: type


class Items:
    """The class and items of a list, dict or set."""

    def __init__(self, value: Any) -> None:
        self.kind, self.items = type(value), flat(items_of_container(value))

    def same(self, other: Any) -> bool:
        """Whether the class and all items are the same."""
        return isinstance(other, Items) and self.kind is other.kind and all_same(self.items, other.items)


class TensorState:
    """The state of a module's tensor: its memory and version and, except for parameters, its values.

    Copies of all weights would cost too much.
    """

    def __init__(self, tensor: Tensor, values: Tensor | None) -> None:
        self.tensor, self.values = tensor, values
        self.place, self.version = address_of(tensor), tensor._version
        self.memory = None if values is None else tensor.detach()

    def is_as_before(self) -> bool:
        if self.tensor._version != self.version or self.has_moved():
            return False
        # Batch norms update their statistics without a new version.
        return self.values is None or _are_equal(self.tensor, self.values)

    def has_moved(self) -> bool:
        """Whether the tensor has other memory."""
        return address_of(self.tensor) != self.place

    def put_back(self) -> None:
        if self.values is not None and self.memory is not None:
            with torch.no_grad():
                if self.has_moved() or self.tensor.shape != self.values.shape:
                    self.tensor.data = self.memory  # the forward has set other memory
                self.tensor.copy_(self.values)


class ModuleState:
    """The state of one module: its attributes, parameters, buffers and submodules, and mutable values in attributes.

    Attributes:
        tensors: its tensors by name, parameters and buffers first.
        generators: random generators among its attributes.
        held: attribute's name -> states of the places in it.
    """

    def __init__(self, module: nn.Module, places: Places) -> None:
        self.module, self.kind = module, type(module)
        self.own = dict(vars(module))
        self.stores = {key: dict(self.own[key]) for key in STORES}
        self._names, self._values = [*self.own], [*self.own.values()]
        self._empty: list[tuple[str, Any]] = []
        self._items: dict[str, Items] = {}
        self.held: list[tuple[str, Held]] = []
        self._iterators: dict[str, Any] = {}
        self._states = [
            (key, TensorState(one, None)) for key, one in self.stores["_parameters"].items() if _has_version(one)
        ]
        self.generators: list[Any] = []
        # Most attributes are plain values and empty tables of hooks: this is asked of them first.
        for key, value in {**self.own, **self.stores["_buffers"]}.items():
            if type(value) in VALUES or key in STORES or key == "forward" or key.startswith(RESERVED):
                continue
            if type(value) in EMPTY and not value:
                self._empty.append((key, value))
            elif isinstance(value, Tensor):
                if _has_version(value):
                    self._states.append((key, TensorState(value, value.detach().clone())))
            elif isinstance(value, GENERATORS):
                self.generators.append(value)
            elif _is_iterator(value):
                self._iterators[key] = copy.copy(value)
            else:
                if isinstance(value, (list, dict, set)):
                    self._items[key] = Items(value)
                self.held += [(key, places.of(place)) for place in _places_of(key, value)]
        self._tables = [table for _, table in self._empty]
        self.tensors = stored_tensors(module)

    def is_as_before(self, checked: Checked) -> bool:
        """Whether the module has not changed since."""
        return (
            not self._iterators
            and self._holds_the_same()
            and not any(self._tables)
            and all(state.is_as_before() for _, state in self._states)
            and all(checked.is_as_before(held) for _, held in self.held)
        )

    def _holds_the_same(self) -> bool:
        """Whether its attributes, parameters, buffers and submodules are the same objects."""
        own = vars(self.module)
        if type(self.module) is not self.kind:
            return False
        if [*own] != self._names or not all(map(is_, own.values(), self._values)):
            return False
        return all(
            [*own[key]] == [*store] and all(map(is_, own[key].values(), store.values()))
            for key, store in self.stores.items()
            if store or own[key]
        )

    def moved(self) -> list[str]:
        """The names of its tensors that have other memory."""
        return [key for key, state in self._states if state.has_moved()]

    def has_own_parameters(self) -> bool:
        """Whether its parameters and buffers are the same objects; `torch.func.functional_call` replaces them."""
        own = vars(self.module)
        held = {**self.stores["_parameters"], **self.stores["_buffers"]}
        return all(value is held.get(name) for key in STORES[:2] for name, value in own[key].items())

    def replaced(self) -> dict[str, tuple[Any, Any]]:
        """The attributes, parameters, buffers and submodules that were replaced: name -> (before, now).

        Lists, dicts and sets are `Items`; MISSING stands for no value.
        """
        containers = {key: Items(self.own[key]) for key in self._items}
        same_items = all(one.same(containers[key]) for key, one in self._items.items())
        if same_items and not any(self._tables) and self._holds_the_same():
            return {}
        own = vars(self.module)
        before, now = _flat(self.own, self.stores), _flat(own, own)
        changes: dict[str, tuple[Any, Any]] = {}
        if type(self.module) is not self.kind:
            changes[CLASS] = self.kind, ChangedClass(type(self.module))
        for name in {**before, **now}:
            one, other = before.get(name, MISSING), now.get(name, MISSING)
            if isinstance(one, (list, dict, set)):
                one = self._items.get(name) or Items(type(one)())
            if isinstance(other, (list, dict, set)):
                other = Items(other)
            if one is not other and not (isinstance(one, Items) and one.same(other)):
                changes[name] = one, other
        return changes

    def put_back(self, checked: Checked) -> set[str]:
        """Restore the module; returns the names of the attributes and tensors that had changed."""
        if self.is_as_before(checked):
            return set()
        own = vars(self.module)
        before, now = _put_back(self.own, self.stores), _put_back(own, own)
        changed = {key for key in {*before, *now} if before.get(key, MISSING) is not now.get(key, MISSING)}
        changed |= {key for key, one in self.stores["_parameters"].items() if own["_parameters"].get(key) is not one}
        if type(self.module) is not self.kind:
            self.module.__class__ = self.kind
            changed.add(CLASS)
        for key in set(own) - set(self.own):
            del own[key]
        own.update(self.own)
        for key, store in self.stores.items():
            own[key].clear()
            own[key].update(store)
        for key, table in self._empty:
            if table:
                changed.add(key)
                table.clear()
        for key, held in self.held:
            if not checked.is_as_before(held):
                changed.add(key)
                held.put_back()
        for key, iterator in self._iterators.items():
            own[key] = copy.copy(iterator)
        for key, state in self._states:
            if not state.is_as_before():
                changed.add(key)
                state.put_back()
        return changed - OURS


def stored_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors that a module itself holds, by name, parameters and buffers first."""
    own = vars(module)
    stores = (own.get("_parameters"), own.get("_buffers"), own)
    return [(key, one) for store in stores for key, one in (store or {}).items() if isinstance(one, Tensor)]


def _flat(own: dict[str, Any], stores: dict[str, Any]) -> dict[str, Any]:
    """The attributes, parameters, buffers and submodules of a module, by name."""
    attributes = {key: value for key, value in own.items() if key not in OURS and key not in STORES}
    return {**attributes, **stores["_parameters"], **stores["_buffers"], **stores["_modules"]}


def _put_back(own: dict[str, Any], stores: dict[str, Any]) -> dict[str, Any]:
    """The values of a module that a call may replace, by name; parameters are not among them."""
    return {**own, **stores["_buffers"], **stores["_modules"]}


def _places_of(key: str, value: Any) -> list[Place]:
    """The mutable places in an attribute, each once."""
    if isinstance(value, (list, dict, set)):
        first = [Content(value, key)]
    else:
        first = [Content(one, key) for one in _own_objects(value)]
    deeper = () if key in OF_EVERY_MODULE else contents_of(value, key)
    return list({place.key: place for place in (*first, *deeper)}.values())


def _own_objects(value: Any) -> list[Any]:
    """An object in which a module keeps state, and the lists, dicts and queues directly in it."""
    if isinstance(value, OPAQUE) or not (isinstance(value, deque) or hasattr(value, "__dict__")):
        return []
    return [value, *(part for part in attributes_of(value).values() if isinstance(part, (list, dict, deque)))]


def _is_iterator(value: Any) -> bool:
    """Whether a value is an iterator, other than a generator, whose position can be saved."""
    if isinstance(value, OPAQUE) or not (hasattr(value, "__next__") and hasattr(value, "__iter__")):
        return False
    return copyable(value)


def _has_version(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not (is_lazy(tensor) or tensor.is_meta or tensor.is_inference())


def address_of(tensor: Tensor) -> int:
    """Where a tensor lies in memory; 0 for one without memory."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):  # sparse tensors, and lazy parameters
        return 0


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values; NaN is NaN."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
