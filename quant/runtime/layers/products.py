"""The products of static int8 layers: linear, convolution and transposed convolution, with their settings.

Each names the operators that compute it, the axis of its channels, and the kernel that a backend uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from quant.kernels import Backend, narrow

Padding = tuple[list[int], str]
"""Widths as F.pad takes them, and its mode."""


@dataclass(frozen=True)
class Product:
    """The kind of product of an int8 layer, with its settings; the base class.

    Attributes:
        name: for reports and errors.
        integers, reals: the operators in `Backend.operators` with uint8 and float32 results.
        pad_before: padding applied to the input first, where the operator's own padding cannot express it; or None.
    """

    name: ClassVar[str]
    integers: ClassVar[str]
    reals: ClassVar[str]
    pad_before: Padding | None = field(default=None, kw_only=True)

    @property
    def plans(self) -> bool:
        """Whether plans can compute it."""
        return True

    @property
    def settings(self) -> dict[str, Any]:
        """The operators' arguments between bias and multiplier, in order, by name."""
        return {}

    def along_channels(self, values: Tensor, dims: int) -> Tensor:
        """A value per output channel, (out,), reshaped to broadcast with an output of `dims` dimensions."""
        return values

    def stored(self, q_weight: Tensor, bits: int) -> Tensor:
        """An int8 weight of so many bits as its layer holds it: narrow where kernels read that."""
        return q_weight

    def real_weight(self, q_weight: Tensor, scale: Tensor) -> Tensor:
        """The dequantised weight, by a scale per output channel."""
        return q_weight.to(torch.float32) * scale.reshape(-1, *[1] * (q_weight.dim() - 1))

    def lacks_batch(self, x: Tensor) -> bool:
        """Whether `x` is one sample without a batch dimension, which torch takes and the operators do not."""
        return False

    def why_not(self, backend: Backend, q_weight: Tensor) -> str:
        """'' where `backend` computes it with this weight; else the reason that the reference does."""
        return ""

    def route(self, backend: Backend, q_weight: Tensor) -> str:
        """How the backend forms the products with this weight."""
        return backend.route(q_weight)


@dataclass(frozen=True)
class LinearProduct(Product):
    """y = x weight' + bias, the weight (out, in)."""

    name: ClassVar[str] = "linear"
    integers: ClassVar[str] = "linear_u8s8_u8"
    reals: ClassVar[str] = "linear_u8s8_f32"

    def stored(self, q_weight: Tensor, bits: int) -> Tensor:
        return narrow.from_bytes(q_weight, bits)

    def real_weight(self, q_weight: Tensor, scale: Tensor) -> Tensor:
        return super().real_weight(narrow.as_bytes(q_weight), scale)


@dataclass(frozen=True)
class ConvProduct(Product):
    """A convolution, its settings as torch's, one number per spatial dimension.

    The weight is (out, in / groups, kernel...).
    """

    name: ClassVar[str] = "conv"
    integers: ClassVar[str] = "conv_u8s8_u8"
    reals: ClassVar[str] = "conv_u8s8_f32"
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}

    def along_channels(self, values: Tensor, dims: int) -> Tensor:
        return values.reshape(-1, *[1] * (dims - 2))

    def lacks_batch(self, x: Tensor) -> bool:
        return x.dim() == len(self.stride) + 1

    def why_not(self, backend: Backend, q_weight: Tensor) -> str:
        return backend.why_not_conv(q_weight, self.groups)

    def route(self, backend: Backend, q_weight: Tensor) -> str:
        return backend.conv_route(q_weight, self.groups)


@dataclass(frozen=True)
class TransposedProduct(ConvProduct):
    """A transposed convolution; the weight (in, out / groups, kernel...)."""

    name: ClassVar[str] = "conv_transpose"
    integers: ClassVar[str] = "conv_transpose_u8s8_u8"
    reals: ClassVar[str] = "conv_transpose_u8s8_f32"
    output_padding: Sequence[int] = ()

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "output_padding": self.output_padding}

    @property
    def plans(self) -> bool:
        return self.has_phases

    @property
    def has_phases(self) -> bool:
        """Whether `polyphase.py` can compute it, which it cannot with a dilation."""
        return set(self.dilation) == {1}

    def real_weight(self, q_weight: Tensor, scale: Tensor) -> Tensor:
        shape = [scale.numel() // self.groups, *[1] * (q_weight.dim() - 2)]
        parts = zip(q_weight.split(q_weight.shape[0] // self.groups), scale.chunk(self.groups), strict=True)
        return torch.cat([part.to(torch.float32) * own.reshape(shape) for part, own in parts])

    def why_not(self, backend: Backend, q_weight: Tensor) -> str:
        return "" if backend.transposes else "a transposed convolution with a dilation"

    def route(self, backend: Backend, q_weight: Tensor) -> str:
        return backend.route(q_weight)
