"""Parameters that have become parts of int8 layers, put back for the user's own forward.

Weights of functional layers (`F.linear(x, self.weight)`) are no module of their own; for the user's forward they are
put back as the real values of their integers, when it first runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quant.runtime.names import attribute


class RestoredTensor(NamedTuple):
    """A parameter, or some rows of one, that is an int8 layer now.

    Attributes:
        path: dotted name of the parameter.
        sliced: whether it is some rows; those of all layers of this path are joined in order.
        layer: key of the layer among the runner's.
        is_weight: of the layer's weight; else of its bias.
    """

    path: str
    sliced: bool
    layer: str
    is_weight: bool


class WeightsToRestore:
    """The parameters that a user's forward reads and that have become parts of int8 layers."""

    def __init__(self, tensors: Iterable[RestoredTensor]) -> None:
        self.tensors = tuple(tensors)
        self._done = False

    def restore(self, root: nn.Module, layers: nn.ModuleDict) -> None:
        """Set the parameters that are gone to the real values of the integers they became."""
        if self._done:
            return
        found: dict[str, list[Tensor]] = {}
        for one in self.tensors:
            layer: Any = layers[one.layer]
            value = layer.unfolded()[0 if one.is_weight else 1]
            if value is not None:
                found.setdefault(one.path, []).append(value)
        sliced = {one.path for one in self.tensors if one.sliced}
        for path, values in found.items():
            owner, _, name = path.rpartition(".")
            module = root.get_submodule(owner)
            if _is_gone(module, name):
                module.__dict__[name] = torch.cat(values) if path in sliced else values[0]
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
