"""Restores parameters that int8 layers have replaced, for the user's own forward.

The weight of a functional layer (`F.linear(x, self.weight)`) belongs to no module that could be replaced. When the
user's forward first runs, such a parameter gets the real values of its integers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quant.runtime.names import attribute


class RestoredTensor(NamedTuple):
    """A parameter, or some rows of one, that an int8 layer holds now.

    Attributes:
        path: dotted name of the parameter.
        sliced: whether it is some rows; the rows of all layers with this path are joined in order.
        layer: key of the layer in the runner's `layers`.
        is_weight: whether it is the layer's weight; else its bias.
        turned: whether it is (in, out), as for `x @ weight`.
    """

    path: str
    sliced: bool
    layer: str
    is_weight: bool
    turned: bool = False


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
            value = layer.unfolded()[0 if one.is_weight else 1]
            if value is not None:
                values_of.setdefault(one.path, []).append(value.t() if one.turned else value)
        sliced = {one.path for one in self.tensors if one.sliced}
        for path, rows in values_of.items():
            owner, _, name = path.rpartition(".")
            module = root.get_submodule(owner)
            if _is_gone(module, name):
                module.__dict__[name] = torch.cat(rows) if path in sliced else rows[0]
        self._done = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_done": False}


def _is_gone(module: nn.Module, name: str) -> bool:
    if name in module.__dict__:
        return False
    try:
        value = attribute(module, name)
    except AttributeError:
        return True
    return value is None or (isinstance(value, Tensor) and value.numel() == 0)
