"""The quantised layers of a torch.ao model, read from its state_dict: packed weights as plain integers and scales.

torch.ao keeps weights in packed objects of its engine, and its state_dict unpacks them. By layer there is

    {name}._packed_params._packed_params    linear layers: the weight and the bias
    {name}.weight, {name}.bias              convolutions: a quantised weight
    {name}._packed_params._packed_weight    embeddings: a table with a scale and a zero point per row
    {name}._all_weight_values.{i}.param     LSTM and GRU: a packed object per layer and direction
    {name}._packed_weight_ih, ..._hh        recurrent cells

(torch/ao/nn/quantized/modules and torch/ao/nn/quantized/dynamic/modules, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quant.kernels.scheme import quantize_weight

LINEAR = "_packed_params._packed_params"
TABLE = "_packed_params._packed_weight"
SEQUENCE = "_all_weight_values"
CELL = ("_packed_weight_ih", "_packed_weight_hh")


@dataclass(frozen=True)
class Int8Weight:
    """A weight of torch.ao's in this package's form: real = scale * q_weight, the zero point 0.

    Attributes:
        q_weight: int8, in the layout of the float layer.
        scale: float32 (out,), or () where all channels have one.
        remark: what was changed to get there, for the report; else ''.
    """

    q_weight: Tensor
    scale: Tensor
    remark: str = ""

    @property
    def per_channel(self) -> bool:
        """Whether each output channel has a scale of its own."""
        return self.scale.dim() == 1

    def rows(self, outputs: int) -> Tensor:
        """The scale of each of `outputs` channels, float32 (outputs,).

        A grouped transposed convolution has a scale for each channel within a group.
        """
        if not self.per_channel:
            return self.scale.expand(outputs).contiguous()
        return self.scale.repeat(outputs // len(self.scale))


@dataclass(frozen=True)
class Product:
    """A linear layer or a convolution.

    Attributes:
        quantized: the weight, a quantised tensor in the layout of the float layer; or int8, of a PT2E program.
        bias: float32 (out,), or None.
        dynamic: whether its activations are quantised when they come.
        scale, zero_point: of an int8 `quantized`, () or (out,).
    """

    quantized: Tensor
    bias: Tensor | None
    dynamic: bool = False
    scale: Tensor | None = None
    zero_point: Tensor | None = None

    def weight(self, axis: int) -> Int8Weight:
        """Its integers; `axis` is that of the output channels."""
        if self.scale is None or self.zero_point is None:
            return int8_weight(self.quantized, axis)
        return with_zero_point_0(self.quantized, self.scale, self.zero_point, axis)


@dataclass(frozen=True)
class Direction:
    """One direction of one recurrent layer, or a cell."""

    weight_ih: Int8Weight
    weight_hh: Int8Weight
    bias_ih: Tensor | None
    bias_hh: Tensor | None


@dataclass(frozen=True)
class Recurrent:
    """A recurrent layer: its directions in torch's order."""

    directions: tuple[Direction, ...]


@dataclass(frozen=True)
class Table:
    """An embedding table in the rows of `quant.kernels.tables`.

    Attributes:
        rows: uint8 (num_embeddings, row_bytes).
        shape: (num_embeddings, embedding_dim).
        bits: 8 or 4.
    """

    rows: Tensor
    shape: tuple[int, int]
    bits: int


@dataclass(frozen=True)
class Unread:
    """A layer without int8 integers, with the reason; it stays float."""

    reason: str


Layer = Product | Recurrent | Table | Unread


def packed_layers(state: Mapping[str, Any]) -> dict[str, Layer]:
    """The quantised layers by their dotted names.

    Args:
        state: the state_dict of a model that torch.ao converted.
    """
    layers: dict[str, Layer] = {}
    sequences: dict[str, list[Any]] = {}
    for key, value in state.items():
        name, owner = _owner(key)
        if owner == LINEAR:
            layers[name] = _linear(*value, dynamic=_has_no_range(name, state))
        elif owner == TABLE:
            layers[name] = _table(value)
        elif owner == SEQUENCE:
            sequences.setdefault(name, []).append(value)
        elif owner == CELL[0]:
            layers[name] = _recurrent([(value, state[_join(name, CELL[1])])])
        elif owner == "weight" and _is_quantized(value) and _join(name, TABLE) not in state:
            layers[name] = Product(value.detach(), _real(state.get(_join(name, "bias"))))
    for name, packed in sequences.items():
        layers[name] = _recurrent([one.__getstate__()[0][4] for one in packed])
    return layers


def _owner(key: str) -> tuple[str, str]:
    """A key's layer, and what it is of the layer."""
    parts = key.split(".")
    if len(parts) > 2 and parts[-3] == SEQUENCE:
        return ".".join(parts[:-3]), SEQUENCE
    taken = 2 if ".".join(parts[-2:]) in (LINEAR, TABLE) else 1
    return ".".join(parts[:-taken]), ".".join(parts[-taken:])


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _has_no_range(name: str, state: Mapping[str, Any]) -> bool:
    """Whether a linear layer is dynamic: torch.ao then leaves scale and zero point of its output at 1 and 0."""
    scale, zero_point = (state.get(_join(name, what)) for what in ("scale", "zero_point"))
    return scale is None or zero_point is None or (float(scale) == 1.0 and int(zero_point) == 0)


def _is_quantized(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_quantized


def _real(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().to(torch.float32).clone()


def _linear(weight: Tensor, bias: Tensor | None, *, dynamic: bool) -> Layer:
    if not weight.is_quantized:
        return Unread("float16 in torch.ao, which has no integers to take over")
    return Product(weight.detach(), _real(bias), dynamic)


def _recurrent(pairs: list[Any]) -> Layer:
    directions = []
    for packed in pairs:
        (weight_ih, bias_ih), (weight_hh, bias_hh) = (one.unpack() for one in packed)
        if not weight_ih.is_quantized:
            return Unread("float16 in torch.ao, which has no integers to take over")
        directions.append(Direction(int8_weight(weight_ih), int8_weight(weight_hh), _real(bias_ih), _real(bias_hh)))
    return Recurrent(tuple(directions))


def int8_weight(weight: Tensor, axis: int = 0) -> Int8Weight:
    """The integers of a quantised weight; rounded anew where a zero point is not 0.

    Args:
        weight: a quantised tensor of int8, with one scale or with one for each output channel.
        axis: of the output channels.
    """
    per_channel = weight.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
    zero_points = weight.q_per_channel_zero_points() if per_channel else torch.tensor(weight.q_zero_point())
    scale = weight.q_per_channel_scales() if per_channel else torch.tensor(weight.q_scale())
    return with_zero_point_0(weight.int_repr(), scale, zero_points, axis)


def with_zero_point_0(integers: Tensor, scale: Tensor, zero_point: Tensor, axis: int) -> Int8Weight:
    """Int8 integers as they are, or rounded anew where a zero point is not 0.

    Args:
        scale, zero_point: () or (out,).
        axis: of the output channels.
    """
    scale = scale.detach().to(torch.float32)
    if not bool(zero_point.any()):
        return Int8Weight(integers.detach().contiguous(), scale.contiguous())
    shape = [-1 if place == axis and scale.dim() else 1 for place in range(integers.dim())]
    real = (integers.to(torch.float32) - zero_point.reshape(shape)) * scale.reshape(shape)
    remark = "weights rounded anew, as their zero point in torch.ao is not 0"
    return Int8Weight(*quantize_weight(real, axis=axis), remark)


def _table(weight: Tensor) -> Layer:
    """The rows of `quant.kernels.tables`: bytes, then scale and bias = -zero_point * scale, as FBGEMM packs them."""
    rows, dim = weight.shape
    scale, zero_point = weight.q_per_channel_scales(), weight.q_per_channel_zero_points()
    values = weight.int_repr()
    bits = 8 if values.numel() == weight.numel() else 4
    if bits == 4 and dim % 2:
        return Unread("a table of 4 bits with an odd number of columns, whose rows do not begin at a byte")
    real = torch.float32 if bits == 8 else torch.float16
    ends = torch.stack([scale, -zero_point * scale], dim=1).to(real).contiguous().view(torch.uint8)
    packed = torch.cat([values.reshape(rows, -1), ends], dim=1).contiguous()
    return Table(packed, (rows, dim), bits)
