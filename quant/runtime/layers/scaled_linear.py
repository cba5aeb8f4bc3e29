"""A linear layer whose input channels are scaled before they reach the weight: what smoothing puts in an `nn.Linear`'s
place (`quant/smoothing/`).

It computes what the layer computes, whoever calls it and wherever its input comes from. A captured graph shows the
product with `columns` as a call of its own, so that ranges, rounding, training and files know of no special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_INT8 = (
    "ScaledLinear: there is no float weight to read: its weight is int8, a part of the converted program, which "
    "`model.program` prints; read it from the float model, or convert with smooth=False, where layers keep a readable "
    "weight"
)


class ScaledLinear(nn.Linear):
    """y = (x * columns) scaled_weight' + bias, which is y = x weight' + bias.

    Attributes:
        scaled_weight: the weight divided by `columns`, (out, in): the one that is trained and made int8.
        columns: float32, (in,), positive: a buffer.
    """

    scaled_weight: nn.Parameter | None
    columns: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight for the input as it comes, computed from `scaled_weight`."""
        if self.scaled_weight is None:
            raise AttributeError(_INT8)  # after which Python asks __getattr__
        return self.scaled_weight * self.columns

    def __getattr__(self, name: str) -> Any:
        if isinstance(getattr(type(self), name, None), property):
            raise AttributeError(_INT8)
        return super().__getattr__(name)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input * self.columns, self.scaled_weight, self.bias)  # type: ignore[arg-type]


def scale_inputs(model: nn.Module, columns: dict[str, Tensor]) -> nn.Module:
    """Make each named linear layer a `ScaledLinear`; returns the model, which is changed in place.

    The modules stay the same objects, with whatever else was set on them: a forward may hold a layer in a list, too.

    Args:
        columns: float32 (in,) by the layer's name; layers with the same tensor share it.
    """
    for name, factors in columns.items():
        layer = model.get_submodule(name)
        if type(layer) is nn.Linear:
            _scale_input(layer, factors)
        elif not isinstance(layer, ScaledLinear):  # as a shared layer is, under its second name
            raise TypeError(
                f"layer {name!r} is a {type(layer).__name__}, expected an nn.Linear, whose input was scaled"
            )
    return model


def _scale_input(layer: nn.Linear, columns: Tensor) -> None:
    weight, bias = layer._parameters.pop("weight"), layer._parameters.pop("bias")
    assert weight is not None
    columns = columns.to(weight.device)
    own = (weight.detach() / columns).to(weight.dtype)
    layer.__class__ = ScaledLinear
    layer.register_parameter("scaled_weight", nn.Parameter(own, requires_grad=weight.requires_grad))
    layer.register_parameter("bias", bias)
    layer.register_buffer("columns", columns)


def columns_of(model: nn.Module) -> dict[str, Tensor]:
    """The columns of the layers that `scale_inputs` put in place, by name."""
    return {name: module.columns for name, module in model.named_modules() if isinstance(module, ScaledLinear)}


def ones_for(model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Columns of ones, for a model whose own ones come later, from a file."""
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    return {name: torch.ones(layer.in_features) for name, layer in layers.items()}
