"""The ranges of the places that call an int8 layer: buffers with a number per place.

input_scale, output_scale: float32, (sites,). input_zero_point, output_zero_point: int32, (sites,). An output_scale of 0
says that the place takes float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quant.kernels import QParams

RANGES = tuple(f"{end}_{number}" for end in ("input", "output") for number in ("scale", "zero_point"))
"""The names of the buffers."""


def register_sites(layer: nn.Module) -> None:
    """Give a layer the buffers, for no place yet."""
    for name in ("input", "output"):
        layer.register_buffer(f"{name}_scale", torch.empty(0))
        layer.register_buffer(f"{name}_zero_point", torch.empty(0, dtype=torch.int32))


def add_site(layer: Any, x: QParams, y: QParams | None) -> int:
    """Take note of one more place that calls a layer; returns its number."""
    layer.input_scale = torch.cat([layer.input_scale, x.scale.reshape(1)])
    layer.input_zero_point = torch.cat([layer.input_zero_point, x.zero_point.reshape(1)])
    scale, zero_point = (torch.zeros(1), torch.zeros(1, dtype=torch.int32)) if y is None else (y.scale, y.zero_point)
    layer.output_scale = torch.cat([layer.output_scale, scale.reshape(1)])
    layer.output_zero_point = torch.cat([layer.output_zero_point, zero_point.reshape(1)])
    return len(layer.input_scale) - 1
