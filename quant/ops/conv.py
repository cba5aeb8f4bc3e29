"""Convolutions, ordinary and transposed, of one to three dimensions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.ops.call import Call, StaysFloat, per_dimension
from quant.ops.linear import own_bias, own_parameter, own_weight
from quant.ops.operator import Weighted
from quant.ops.registry import Recognised, recognises
from quant.runtime.layers.products import ConvProduct, Padding, TransposedProduct
from quant.runtime.names import attribute
from quant.runtime.trees import Attr, Ref

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Conv(Weighted):
    """A convolution, its settings as torch's.

    Attributes:
        pad_before: padding applied to the input first, where the sides differ or it is not zeros.
    """

    name: ClassVar[str] = "conv"
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    pad_before: Padding | None = None

    @property
    def needs_rank(self) -> bool:
        return True

    def int8(self) -> ConvProduct:
        return ConvProduct(self.stride, self.padding, self.dilation, self.groups, pad_before=self.pad_before)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        function = _CONV[weight.dim() - 2]
        return function(self.padded(x), weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def padded(self, x: Tensor) -> Tensor:
        return x if self.pad_before is None else F.pad(x, *self.pad_before)


@dataclass(frozen=True)
class ConvTranspose(Conv):
    """A transposed convolution, whose weight is (in, out / groups, kernel...)."""

    name: ClassVar[str] = "conv_transpose"
    output_padding: tuple[int, ...] = ()

    def int8(self) -> TransposedProduct:
        places = (self.stride, self.padding, self.dilation, self.groups, self.output_padding)
        return TransposedProduct(*places, pad_before=self.pad_before)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        function = _TRANSPOSED[weight.dim() - 2]
        places = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return function(self.padded(x), weight, bias, *places)

    def output_first(self, weight: Tensor) -> Tensor:
        parts = weight.reshape(self.groups, -1, *weight.shape[1:]).transpose(1, 2)
        return parts.reshape(-1, *parts.shape[2:])

    def as_layer(self, rows: Tensor) -> Tensor:
        # With groups, (groups * out', in', ...) and (groups * in', out', ...): the permutation is its own inverse.
        return self.output_first(rows)


@recognises(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def conv_module(call: Call) -> Recognised:
    """`nn.Conv1d` ... `nn.ConvTranspose3d`."""
    module: Any = call.module
    batched = call.activation()
    if call.rank(batched) != len(module.kernel_size) + 2:
        raise StaysFloat("its input has no batch dimension")
    transposed = module.transposed
    if transposed and len(call.node.args) + len(call.node.kwargs) > 1:
        raise StaysFloat("its output_size is given at run time")
    settings: dict[str, Any] = {
        "weight": own_parameter("weight", call),
        "bias": own_parameter("bias", call),
        "stride": module.stride,
        "dilation": module.dilation,
        "groups": module.groups,
        **_padding(module.padding, module.padding_mode, module.dilation, module.kernel_size),
    }
    if transposed:
        return Recognised(ConvTranspose(**settings, output_padding=module.output_padding), (batched,))
    return Recognised(Conv(**settings), (batched,))


def _conv_function(call: Call, dims: int) -> Recognised:
    """`F.conv1d` ... `F.conv3d`."""
    batched = call.activation()
    if call.rank(batched) != dims + 2:
        raise StaysFloat("its input has no batch dimension")
    weight = own_weight(call)
    meta = call.graph.nodes[weight.index].meta if isinstance(weight, Ref) else None
    kernel = meta.shape[2:] if meta else tuple(_tensor(call, weight).shape[2:])
    padding = call.constant(call.get(4, "padding", 0), "padding")
    dilation = per_dimension(call.constant(call.get(5, "dilation", 1), "dilation"), dims)
    operator = Conv(
        weight=weight,
        bias=own_bias(call),
        stride=per_dimension(call.constant(call.get(3, "stride", 1), "stride"), dims),
        dilation=dilation,
        groups=call.constant(call.get(6, "groups", 1), "groups"),
        **_padding(padding if isinstance(padding, str) else per_dimension(padding, dims), "zeros", dilation, kernel),
    )
    return Recognised(operator, (batched,))


recognises(torch.conv1d)(partial(_conv_function, dims=1))
recognises(torch.conv2d)(partial(_conv_function, dims=2))
recognises(torch.conv3d)(partial(_conv_function, dims=3))


def _tensor(call: Call, weight: Any) -> Tensor:
    tensor: Tensor = attribute(call.root, weight.path) if isinstance(weight, Attr) else weight
    return tensor


def _padding(padding: Any, mode: str, dilation: Any, kernel: Any) -> dict[str, Any]:
    """Padding that both sides share goes to the kernel; the rest (uneven "same", circular, ...) is a pad before it."""
    dims = len(kernel)
    if padding == "valid":
        return {"padding": (0,) * dims, "pad_before": None}
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in padding]
    if mode == "zeros" and all(left == right for left, right in sides):
        return {"padding": tuple(left for left, _ in sides), "pad_before": None}
    widths = [width for side in reversed(sides) for width in side]
    return {"padding": (0,) * dims, "pad_before": (widths, "constant" if mode == "zeros" else mode)}
