"""Dynamic layers of torch.ao: a dynamic conversion of the float model with their integers."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.dynamic import quantize_dynamic
from quant.migrate.packed_layers import Direction, Int8Weight, Layer, Product, Recurrent, Table, Unread
from quant.migrate.remarks import Remarks
from quant.nn import Embedding, EmbeddingBag, Linear
from quant.nn.recurrent import Direction as OwnDirection
from quant.recipe import Pattern, QConfig, Recipe
from quant.runtime.names import has_submodule, submodule

RANGES = (
    "the integers of torch.ao's weight; its activations had one range of 7 or 8 bits per tensor, here each row has its "
    "own of 8"
)
TABLE_ROWS = "the rows of torch.ao's table"


def dynamic_model(
    layers: Mapping[str, Layer], float_model: nn.Module, backend: str | None, remarks: Remarks
) -> nn.Module:
    """The dynamic conversion of `float_model` in which exactly `layers` are int8, with their integers.

    Args:
        layers: by their names in the float model.
        remarks: gets what is to be said of each.
    """
    rules: dict[Pattern, QConfig | None] = {glob.escape(name): setting_of(one) for name, one in layers.items()}
    model = quantize_dynamic(float_model, Recipe(rules, default=None), backend=backend)
    take_over(model, layers, remarks)
    return model


def setting_of(layer: Layer) -> QConfig | None:
    """The settings under which a dynamic layer has integers of the form of torch.ao's; None leaves it float."""
    if isinstance(layer, Unread):
        return None
    if isinstance(layer, Table):
        return QConfig(weight_bits=layer.bits)
    weight = layer.weight(0) if isinstance(layer, Product) else layer.directions[0].weight_ih
    return QConfig(activation_bits=8, per_channel=weight.per_channel)


@torch.no_grad()
def take_over(model: nn.Module, layers: Mapping[str, Layer], remarks: Remarks) -> None:
    """Write the integers of `layers` into the dynamic int8 layers of a converted model."""
    for name, layer in layers.items():
        own: Any = submodule(model, name) if has_submodule(model, name) else None
        if isinstance(layer, Product) and isinstance(own, Linear):
            weight = layer.weight(0)
            _put(own, "q_weight", "scale", weight)
            _put_bias(own, "bias", layer.bias)
            remarks.add(name, RANGES)
            remarks.add(name, weight.remark)
        elif isinstance(layer, Recurrent):
            for part, theirs in zip(_directions(own), layer.directions, strict=True):
                _take_direction(part, theirs)
            remarks.add(name, RANGES)
            remarks.add(name, next((one.remark for d in layer.directions for one in (d.weight_ih, d.weight_hh)), ""))
        elif isinstance(layer, Table) and isinstance(own, (Embedding, EmbeddingBag)):
            own.rows.copy_(layer.rows)
            remarks.add(name, TABLE_ROWS)
            if isinstance(own, EmbeddingBag) and own.mode != "sum":
                remarks.add(name, f"torch.ao adds up its bags; here they have the float model's mode, {own.mode}")
        elif isinstance(layer, Unread):
            remarks.add(name, layer.reason)
        else:
            remarks.add(name, "dynamic in torch.ao, where this package has no dynamic int8 layer")


def _directions(layer: nn.Module) -> list[OwnDirection]:
    return [one for one in layer.modules() if isinstance(one, OwnDirection)]


def _take_direction(own: OwnDirection, theirs: Direction) -> None:
    _put(own, "q_weight_ih", "scale_ih", theirs.weight_ih)
    _put(own, "q_weight_hh", "scale_hh", theirs.weight_hh)
    _put_bias(own, "bias_ih", theirs.bias_ih)
    _put_bias(own, "bias_hh", theirs.bias_hh)


def _put(own: nn.Module, q_weight: str, scale: str, weight: Int8Weight) -> None:
    getattr(own, q_weight).copy_(weight.q_weight)
    getattr(own, scale).copy_(weight.rows(weight.q_weight.shape[0]))


def _put_bias(own: nn.Module, name: str, bias: Tensor | None) -> None:
    held: Tensor | None = getattr(own, name)
    if held is not None:
        held.copy_(torch.zeros_like(held) if bias is None else bias)
    elif bias is not None and bool(bias.any()):
        own._parameters[name] = nn.Parameter(bias, requires_grad=False)
