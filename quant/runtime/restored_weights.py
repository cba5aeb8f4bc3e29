"""Restores parameters that int8 layers have replaced, for the user's own forward.

The weight of a functional layer (`F.linear(x, self.weight)`) belongs to no module that could be replaced. When the
user's forward first runs, such a parameter gets the real values of its integers; where the layer's weight is computed
from it by another order of dimensions, a factor or a sum, that is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quant.runtime.names import attribute

PERMUTE, RESHAPE, DIVIDE, SUBTRACT = "permute", "reshape", "divide", "subtract"


def _by_rows(by: float | tuple[float, ...], value: Tensor) -> Tensor | float:
    if not isinstance(by, tuple):
        return by
    return torch.tensor(by, dtype=value.dtype, device=value.device).reshape(-1, *[1] * (value.dim() - 1))


_FUNCTIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    PERMUTE: Tensor.permute,
    RESHAPE: Tensor.reshape,
    DIVIDE: lambda value, by: value / _by_rows(by, value),
    SUBTRACT: lambda value, by: value - _by_rows(by, value),
}

Undo = tuple[tuple[str, tuple[int, ...] | tuple[float, ...] | float], ...]
"""What is done in order: PERMUTE or RESHAPE with a tuple, or DIVIDE or SUBTRACT with a number, or with one for each
row."""


class RestoredTensor(NamedTuple):
    """A parameter, or some rows of one, that an int8 layer holds now.

    Attributes:
        path: dotted name of the parameter.
        sliced: whether it is some rows; the rows of all layers with this path are joined in order.
        layer: key of the layer in the runner's `layers`.
        is_weight: whether it is the layer's weight; else its bias.
        undo: what makes the parameter of it; None where nothing does.
    """

    path: str
    sliced: bool
    layer: str
    is_weight: bool
    undo: Undo | None = ()


def read_restored(
    path: str, sliced: bool, layer: str, is_weight: bool, undo: Iterable[Any] | None = ()
) -> RestoredTensor:
    """One from a file, which has lists for tuples.

    Raises:
        ValueError, TypeError: it does not have that form.
    """
    read: list[tuple[str, tuple[int, ...] | tuple[float, ...] | float]] = []
    for name, by in undo or ():
        number = float if name in (DIVIDE, SUBTRACT) else int
        value = tuple(by) if type(by) is list and all(type(one) is number for one in by) else by
        if name not in _FUNCTIONS or type(value) not in (tuple, float):
            raise ValueError(f"{name} by {by!r} restores no parameter")
        read.append((name, value))
    return RestoredTensor(path, sliced, layer, is_weight, None if undo is None else tuple(read))


class WeightsToRestore:
    """The parameters that a user's forward reads and that int8 layers hold."""

    def __init__(self, tensors: Iterable[RestoredTensor]) -> None:
        self.tensors = tuple(tensors)
        self._done = False

    def restore(self, root: nn.Module, layers: nn.ModuleDict) -> None:
        """Set the missing parameters of `root` to the real rows of their integers, once."""
        if self._done:
            return
        values_of: dict[str, list[Tensor]] = {}
        for one in self.tensors:
            layer: Any = layers[one.layer]
            value = None if one.undo is None else layer.unfolded()[0 if one.is_weight else 1]
            if value is not None:
                values_of.setdefault(one.path, []).append(_undone(value, one.undo or ()))
        sliced = {one.path for one in self.tensors if one.sliced}
        for path, rows in values_of.items():
            owner, _, name = path.rpartition(".")
            if is_gone(root, path):
                root.get_submodule(owner).__dict__[name] = torch.cat(rows) if path in sliced else rows[0]
        self._done = True

    def lost(self, root: nn.Module) -> list[str]:
        """The names of the parameters that cannot be restored, and are not there."""
        paths = dict.fromkeys(one.path for one in self.tensors if one.undo is None)
        return [path for path in paths if is_gone(root, path)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_done": False}


def _undone(value: Tensor, undo: Undo) -> Tensor:
    for name, by in undo:
        value = _FUNCTIONS[name](value, by)
    return value.contiguous()  # a forward may ask for a view of it


def is_gone(root: nn.Module, path: str) -> bool:
    """Whether a conversion has taken a parameter away (`static/removed_tensors.py`)."""
    try:
        value = attribute(root, path)
    except AttributeError:
        return True
    return value is None or (isinstance(value, Tensor) and value.numel() == 0)
