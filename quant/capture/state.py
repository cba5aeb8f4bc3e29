"""What modules and objects hold, compared with what they held before: who writes to what outlives a call."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NO_STATE = {"_parameters", "_buffers", "_modules", "training", "forward"}
"""Attributes of a module that are looked into, or that are ours during a capture."""


def state_of(root: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of every module, parameters, buffers and submodules included, as they are now."""
    found = {}
    for path, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        found[path] = {
            name: _snapshot(value) if isinstance(value, (list, dict, set)) else value
            for name, value in module.__dict__.items()
            if name not in NO_STATE
        }
        for store in ("_parameters", "_buffers", "_modules"):
            found[path].update(module.__dict__[store])
    return found


def modes_of(root: nn.Module) -> dict[str, bool]:
    """Which modules are in training mode, by their names."""
    return {path: module.training for path, module in root.named_modules()}


@dataclass(frozen=True)
class Snapshot:
    """What a list, dict or set held, item by item."""

    kind: type
    held: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self.kind is other.kind and _all_same(self.held, other.held)


_EMPTY = {kind: Snapshot(kind, ()) for kind in (list, dict, set, OrderedDict)}
"""Most lists and dicts of a module are empty tables of hooks."""


def _snapshot(value: Any) -> Snapshot:
    if not value and type(value) in _EMPTY:
        return _EMPTY[type(value)]
    return Snapshot(type(value), tuple(value.items() if isinstance(value, dict) else value))


def same(one: Any, other: Any) -> bool:
    """Whether nothing was put in place of something: the same object, or an equal number or text."""
    if one is other:
        return True
    if isinstance(one, Snapshot):
        return bool(one == other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return _all_same(one, other)
    return type(one) is type(other) and isinstance(one, (int, float, str)) and one == other


def _all_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(same, one, other))


def differs(before: dict[str, Any], after: dict[str, Any], name: str) -> bool:
    """Whether an attribute was set between two states of a module."""
    return name not in before or name not in after or not same(before[name], after[name])


def same_content(one: tuple[dict[str, Any], Any], other: tuple[dict[str, Any], Any]) -> bool:
    """Whether nothing was put in place of something in an object, by what `objects.content` gave of it."""

    def flat(part: Any) -> tuple[Any, ...]:
        return tuple(part.items()) if isinstance(part, dict) else tuple(part or ())

    return all(_all_same(flat(a), flat(b)) for a, b in zip(one, other, strict=True))


def storages_of(root: nn.Module) -> dict[int, torch.UntypedStorage]:
    """The memory of the parameters, buffers and other tensors that modules hold, by its address.

    What a forward sets in its call is none of it: until the call ends, that is a value like others.
    """
    found: dict[int, torch.UntypedStorage] = {}
    for module in root.modules():
        own = vars(module)
        for store in (own.get("_parameters"), own.get("_buffers"), own):
            for value in (store or {}).values():
                if isinstance(value, Tensor):
                    # Sparse tensors, and tensors without a shape yet, have none.
                    with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
                        storage = value.untyped_storage()
                        found[storage.data_ptr()] = storage
    found.pop(0, None)  # empty tensors
    return found
