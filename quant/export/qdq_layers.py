"""The layers of a QDQ program: float calls around int8 weights, and around roundings of their inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.export.rounding import Rounding
from quant.kernels import narrow
from quant.nn.linear import Linear
from quant.runtime.layers.narrow_bytes import weight_in_bytes
from quant.runtime.layers.products import ConvProduct, LinearProduct, Product, TransposedProduct
from quant.runtime.layers.weighted import StaticLayer

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class QDQWeight(nn.Module):
    """An int8 weight with its scale per output channel; its call gives the real values.

    Args:
        real: the values to keep instead, where they are to stay float.
    """

    q_weight: Tensor
    scale: Tensor
    zeros: Tensor
    real: Tensor | None

    def __init__(self, q_weight: Tensor, scale: Tensor, rounding: Rounding, real: Tensor | None = None) -> None:
        super().__init__()
        self.rounding = rounding
        self.register_buffer("real", None if real is None else real.detach().clone())
        if real is None:
            self.register_buffer("q_weight", q_weight)
            self.register_buffer("scale", scale)
            self.register_buffer("zeros", torch.zeros(scale.numel(), dtype=torch.int64), persistent=False)

    def forward(self) -> Tensor:
        """float32, in the layout of the layer."""
        return self.rounding.weight(self.q_weight, self.scale, self.zeros) if self.real is None else self.real


class QDQLayer(nn.Module):
    """One call of a static layer, real values in and out; its output is not rounded yet.

    Args:
        layer: the int8 layer.
        site: which of its calls.

    Attributes:
        limits: the least and the largest uint8 of its output; None where it gives floats.
    """

    bias: Tensor | None

    def __init__(self, layer: StaticLayer, site: int, rounding: Rounding) -> None:
        super().__init__()
        known = layer.site(site)
        self.product: Product = layer.product
        self.pad = None if known.pad is None else known.pad[:2]
        self.limits = known.limits
        self.clamp = layer.clamps[site] if known.limits is None else None
        # What gives floats has no integer kernel where weights stay float: a linear layer rounds its rows instead.
        alone = known.limits is None and rounding.weights_between_integers_only
        self.rows = rounding if alone and isinstance(self.product, LinearProduct) else None
        transposed = isinstance(self.product, TransposedProduct)  # whose output channels are no first axis
        stays_float = (alone and self.rows is None) or transposed
        q_weight = narrow.as_bytes(layer.q_weight)
        real = self.product.real_weight(q_weight, layer.weight_scale) if stays_float else None
        self.weight = QDQWeight(q_weight, layer.weight_scale, rounding, real)
        scale = layer.input_scale[site].double() * layer.weight_scale.double()
        self.register_buffer("bias", None if known.q_bias is None else (known.q_bias.double() * scale).float())

    def forward(self, x: Tensor) -> Tensor:
        """float32 in and out."""
        if self.pad is not None:
            x = F.pad(x, *self.pad)
        y = self._product(x if self.rows is None else self.rows.rows(x, 8, per_row=True))
        return y if self.clamp is None else torch.clamp(y, *self.clamp)

    def _product(self, x: Tensor) -> Tensor:
        weight, bias, product = self.weight(), self.bias, self.product
        if isinstance(product, TransposedProduct):
            order = (product.stride, product.padding, product.output_padding, product.groups, product.dilation)
            return TRANSPOSED[len(product.stride)](x, weight, bias, *order)
        if isinstance(product, ConvProduct):
            settings = (product.stride, product.padding, product.dilation, product.groups)
            return CONVOLUTIONS[len(product.stride)](x, weight, bias, *settings)
        return F.linear(x, weight, bias)


class QDQAlone(nn.Module):
    """A static layer that no program calls: its input and output are rounded to the ranges that it has by itself."""

    def __init__(self, layer: StaticLayer, rounding: Rounding) -> None:
        super().__init__()
        known = layer.site(layer.own)
        self.rounding, self.product = rounding, layer.product
        self.input, self.output = (
            (known.input_scale, known.input_zero_point),
            (known.output_scale, known.output_zero_point),
        )
        self.call = QDQLayer(layer, layer.own, rounding)

    def forward(self, x: Tensor) -> Tensor:
        """float32 in and out."""
        if self.product.lacks_batch(x):
            return self(x.unsqueeze(0)).squeeze(0)  # type: ignore[no-any-return]
        y: Tensor = self.call(_rounded(x, self.rounding, *self.input))
        if self.call.limits is None:
            return y
        return _rounded(limited(y, self.call.limits, *self.output), self.rounding, *self.output)


def limited(y: Tensor, limits: tuple[int, int], scale: float, zero_point: int) -> Tensor:
    """A fused activation in real values; rounding to 8 bits does one that takes the whole range."""
    low, high = limits
    if limits == (0, 255):
        return y
    if limits == (zero_point, 255):
        return F.relu(y)
    return torch.clamp(y, (low - zero_point) * scale, (high - zero_point) * scale)


def _rounded(x: Tensor, rounding: Rounding, scale: float, zero_point: int) -> Tensor:
    return rounding.dequantize(rounding.quantize(x, scale, zero_point), scale, zero_point)


class QDQLinear(nn.Module):
    """A dynamic linear layer: its input is rounded by the range of each row, then torch's own layer.

    Args:
        layer: the int8 layer.
    """

    columns: Tensor | None
    bias: Tensor | None

    def __init__(self, layer: Linear, rounding: Rounding) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = layer.in_features, layer.out_features, layer.dtype
        self.bits, self.per_row, self.rounding = layer.activation_bits, layer.per_row, rounding
        stays_float = rounding.weights_between_integers_only and (self.bits != 8 or not self.per_row)
        q_weight = weight_in_bytes(layer)
        real = q_weight.float() * layer.scale.unsqueeze(1) if stays_float else None
        self.kept = QDQWeight(q_weight, layer.scale, rounding, real)
        self.register_buffer("columns", layer.columns)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    @property
    def weight(self) -> Tensor:
        """`dtype` (out_features, in_features), for code that reads it."""
        weight: Tensor = self.kept()
        return (weight if self.columns is None else weight * self.columns).to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), of `dtype`."""
        return self.outputs(input, 0, self.out_features)

    def outputs(self, input: Tensor, first: int, last: int) -> Tensor:
        """Only the outputs [first, last), as an attention layer's projections are asked for."""
        x = input.to(torch.float32)
        if self.columns is not None:
            x = x * self.columns
        weight, bias = self.kept(), self.bias
        if (first, last) != (0, self.out_features):
            weight, bias = weight[first:last], None if bias is None else bias[first:last]
        return F.linear(self.rounding.rows(x, self.bits, per_row=self.per_row), weight, bias).to(self.dtype)
