"""Int8 recurrent layers of float ones: which tensors and ranges they get (`runtime/layers/recurrent.py` computes)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels import QParams, narrow
from quant.nn.base import quantized_rows
from quant.ops.recurrent import product_range, state_range
from quant.recipe import QConfig
from quant.recurrent_layers import Tensors, directions_of, is_cell, kind_of, sizes_of, tensors_of
from quant.runtime.layers.recurrent import RecurrentRanges, StaticCell, StaticRecurrent
from quant.runtime.layers.recurrent_module import Int8Tensors
from quant.static.weights import dequantized_rows


def static_recurrent(
    module: nn.Module, qconfig: QConfig, x: QParams, inner: Mapping[str, QParams]
) -> StaticRecurrent | StaticCell:
    """The int8 form of a float recurrent layer.

    Args:
        x: the range of its input.
        inner: those of `ops.recurrent.range_names`.
    """
    for name, parameter in module.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"its {name} holds NaN or inf, expected finite values; check the training")
    kind, sizes = kind_of(module), sizes_of(module)
    tensors = [_int8_tensors(tensors_of(module, *place), qconfig) for place in directions_of(module)]
    layers = range(sizes.num_layers)
    products = [inner[product_range(index)] for index in layers] if sizes.proj_size else []
    ranges = RecurrentRanges(x, [inner[state_range(index)] for index in layers], products)
    if is_cell(module):
        return StaticCell(kind, sizes, tensors[0], ranges)
    return StaticRecurrent(kind, sizes, tensors, ranges)


def _int8_tensors(own: Tensors, qconfig: QConfig) -> Int8Tensors:
    """The weights in the ranges of the observer that the settings name."""
    rounded: dict[str, Tensor] = {}
    for name in ("ih", "hh", "hr"):
        weight = getattr(own, f"weight_{name}")
        if weight is not None:
            rows = weight.detach().to(torch.float32)
            q_rows, rounded[f"scale_{name}"] = quantized_rows(rows, qconfig)
            rounded[f"q_weight_{name}"] = narrow.from_bytes(q_rows, qconfig.weight_bits)
    return Int8Tensors(bias_ih=own.bias_ih, bias_hh=own.bias_hh, **rounded)


def rounded(module: nn.Module, qconfig: QConfig) -> Any:
    """`recurrent_layers.tensors_of` with the weights that the int8 layer has, in float."""

    def tensors(layer_module: nn.Module, layer: int, reverse: bool) -> Tensors:
        own = tensors_of(layer_module, layer, reverse)
        weights = {}
        for name in ("weight_ih", "weight_hh", "weight_hr"):
            weight = getattr(own, name)
            if weight is not None:
                weights[name] = dequantized_rows(weight.detach().to(torch.float32), qconfig)
        return replace(own, **weights)

    return tensors
