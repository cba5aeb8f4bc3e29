"""The state of script modules, which Python's attributes do not show, to compare and to restore."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from quant.capture.module_state import stored_tensors
from quant.capture.places import Checked, Held
from quant.runtime.trees import leaves, map_leaves


class ScriptState:
    """The buffers and attributes of one script module: tensors, numbers, strings, and lists and dicts of them.

    It has the interface of `ModuleState`; a script module has no generators and no objects shared with others.
    """

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self.module = module
        self.tensors = stored_tensors(module)
        self.generators: list[Any] = []
        self.held: list[tuple[str, Held]] = []
        self._values: dict[str, tuple[Any, Any]] = {}
        concrete = module._concrete_type.get_attributes()
        for key in [key for key, (_, is_parameter) in concrete.items() if not is_parameter and key != "training"]:
            with contextlib.suppress(RuntimeError):  # of a class without a Python form
                value = module._c.getattr(key)
                self._values[key] = value, map_leaves(_kept, value)

    def is_as_before(self, checked: Checked) -> bool:
        """Whether the module has not changed since."""
        return all(_same(self.module._c.getattr(key), kept) for key, (_, kept) in self._values.items())

    def put_back(self, checked: Checked) -> set[str]:
        """Restore the module; returns the names of the attributes and tensors that had changed."""
        changed = set()
        for key, (value, kept) in self._values.items():
            now = self.module._c.getattr(key)
            if _same(now, kept):
                continue
            changed.add(key)
            for tensor, values in zip(leaves(value), leaves(kept), strict=True):
                if isinstance(tensor, Tensor):
                    with torch.no_grad():
                        tensor.copy_(values)
            self.module._c.setattr(key, value)
        return changed


def _kept(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _same(one: Any, other: Any) -> bool:
    first, second = list(leaves(one)), list(leaves(other))
    return len(first) == len(second) and all(map(_same_leaf, first, second))


def _same_leaf(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one is other or (type(one) is type(other) and one == other))
    return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, 0.0, 0.0, True)
