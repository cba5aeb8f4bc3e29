"""Training of layers that convert makes dynamic (recurrent ones, attention, embeddings), with rounded weights.

Their activations take a range per row at run time, so there is no range to train. Training can adapt to the rounding of
the weights, which is simulated: per output channel or gate row for products, per row
with a scale and a minimum for tables. Gradients go straight through.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels import quantize_weight, tables
from quant.leaves import base_layer
from quant.qat.weights import straight_through
from quant.recipe import QConfig

TABLES = (nn.Embedding, nn.EmbeddingBag)


def call_rounded(module: nn.Module, qconfig: QConfig, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's own forward, hooks included, on rounded weights.

    Args:
        module: one for which `leaves.is_dynamic` holds.

    Raises:
        ValueError: a weight holds NaN or inf.
    """
    if base_layer(module) is nn.Embedding:
        rows: Tensor = module(*args, **kwargs)  # each row is rounded by itself, so those looked up are enough
        return rounded_rows(rows, qconfig.weight_bits, qconfig.group_size)
    return with_rounded_weights(module, qconfig)(*args, **kwargs)


def with_rounded_weights(module: nn.Module, qconfig: QConfig) -> nn.Module:
    """A shallow copy of the module whose weights are rounded; biases are the module's own."""
    rounded_copy = copy.copy(module)
    rounded_copy.__dict__.pop("forward", None)
    is_table = base_layer(module) in TABLES
    rounded: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        if parameter is None or parameter.dim() != 2:
            rounded[name] = parameter
        elif is_table:
            rounded[name] = rounded_rows(parameter, qconfig.weight_bits, qconfig.group_size)
        else:
            rounded[name] = _rounded_matrix(parameter, qconfig)
    rounded_copy.__dict__["_parameters"] = rounded
    rounded_copy.__dict__["_modules"] = {
        name: child if child is None else with_rounded_weights(child, qconfig)
        for name, child in module._modules.items()
    }
    if isinstance(module, nn.RNNBase):
        names: list[str] = module._flat_weights_names
        rounded_copy.__dict__["_flat_weights"] = [rounded[name] for name in names]
    return rounded_copy


def _rounded_matrix(weight: Tensor, qconfig: QConfig) -> Tensor:
    with torch.no_grad():
        rows = weight.detach() if qconfig.per_channel else weight.detach().reshape(1, -1)
        q_rows, scale = quantize_weight(rows, bits=qconfig.weight_bits)
        value = (q_rows.to(torch.float32) * scale[:, None]).reshape(weight.shape)
    return straight_through(weight, value)


def rounded_rows(rows: Tensor, bits: int, group_size: int | None = None) -> Tensor:
    """Rows of an embedding table, packed and dequantised; (..., dim). Tables have 8, 4, 3 or 2 bits a value,
    and stay as they are for any other number."""
    if bits not in tables.TABLE_BITS or rows.numel() == 0:
        return rows
    with torch.no_grad():
        packed = tables.pack_table(rows.detach().reshape(-1, rows.shape[-1]), bits, group_size)
        value = tables.unpack_rows(packed, bits, rows.shape[-1]).reshape(rows.shape)
    return straight_through(rows, value)
