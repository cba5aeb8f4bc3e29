"""What a call under capture changes: which values it writes to, and whether it says anything of values at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quant.graph import map_leaves
from quant.static.traced import IN_PLACE, Traced

if TYPE_CHECKING:
    from quant.static.tracer import Tracer

SHAPE_METHODS = {"size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_contiguous"}
COUNTED = {"split", "chunk", "unbind", "tensor_split", "hsplit", "vsplit", "split_with_sizes"}
"""Calls whose number of results follows from a size."""


def traced_leaves(tree: Any) -> list[Traced]:
    """Every Traced in nested containers, in order."""
    found: list[Traced] = []

    def visit(leaf: Any) -> None:
        if type(leaf) is Traced:
            found.append(leaf)

    map_leaves(visit, tree)
    return found


def find_tracer(tree: Any) -> Tracer:
    """The tracer of the first Traced in nested containers."""
    return traced_leaves(tree)[0]._tracer


def writes_first_argument(kind: str, target: Any, kwargs: dict[str, Any], module: nn.Module | None) -> bool:
    """Whether the call changes its first argument instead of making a new value."""
    if kind == "module":
        return bool(getattr(module, "inplace", False))
    if kind == "method":
        return bool(target.endswith("_") and not target.endswith("__"))
    name = getattr(target, "__name__", "")
    return target in IN_PLACE or kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__"))


def is_shape_call(kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result follows from shapes and numbers that do, so that a branch on it can be guarded."""
    if kind == "method" and target in SHAPE_METHODS:
        return True
    if kind == "function" and (target is torch.is_floating_point or (target is getattr and args[1] == "shape")):
        return True
    inputs = traced_leaves((args, kwargs))
    return kind == "function" and all(leaf._static for leaf in inputs)


def share_storage(one: Any, other: Any) -> bool:
    """Whether two values are tensors over the same memory."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.layout != other.layout:
        return False
    return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.numel() > 0)
