"""Pooling: the maximum or the mean of windows, and means over dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from quant.ops.call import Call, StaysFloat, per_dimension
from quant.ops.lowering import Context, Kernel, rescaling
from quant.ops.operator import Operator
from quant.ops.registry import Recognised, recognises
from quant.ops.step import Step

Window = int | tuple[int, ...]
"""A setting as torch takes it: one number for all dimensions, or one for each."""


@dataclass(frozen=True)
class MaxPool(Operator):
    """The maximum of each window; settings as torch's."""

    name: ClassVar[str] = "max_pool"
    shares_range: ClassVar[bool] = True
    kernel: tuple[int, ...] = ()
    stride: Window | None = None
    padding: Window = 0
    dilation: Window = 1
    ceil_mode: bool = False

    def lower(self, step: Step, context: Context) -> Kernel:
        options = {name: getattr(self, name) for name in ("stride", "padding", "dilation", "ceil_mode")}
        return Kernel("max_pool", (context.integers(step.inputs[0]), self.kernel), options)


@dataclass(frozen=True)
class AdaptiveMaxPool(Operator):
    """The maximum of each window, for a given output size."""

    name: ClassVar[str] = "adaptive_max_pool"
    shares_range: ClassVar[bool] = True
    size: tuple[int | None, ...] = ()

    def lower(self, step: Step, context: Context) -> Kernel:
        return Kernel("adaptive_max_pool", (context.integers(step.inputs[0]), self.size))


@dataclass(frozen=True)
class AvgPool(Operator):
    """The mean of each window; settings as torch's, `divisor_override` of two dimensions and more."""

    name: ClassVar[str] = "avg_pool"
    kernel: tuple[int, ...] = ()
    stride: Window = 1
    padding: Window = 0
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int | None = None

    def lower(self, step: Step, context: Context) -> Kernel:
        names = ("stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
        options = {name: getattr(self, name) for name in names[: 4 if len(self.kernel) == 1 else 5]}
        return rescaling("avg_pool", step, context, self.kernel, **options)


@dataclass(frozen=True)
class AdaptiveAvgPool(Operator):
    """The mean of each window, for a given output size."""

    name: ClassVar[str] = "adaptive_avg_pool"
    size: tuple[int | None, ...] = ()

    def lower(self, step: Step, context: Context) -> Kernel:
        return rescaling("adaptive_avg_pool", step, context, self.size)


@dataclass(frozen=True)
class Mean(Operator):
    """The mean over dimensions; `over_all` where the call names none."""

    name: ClassVar[str] = "mean"
    dim: tuple[int, ...] = ()
    keepdim: bool = False
    over_all: bool = False

    @property
    def needs_rank(self) -> bool:
        return self.over_all

    def lower(self, step: Step, context: Context) -> Kernel:
        return rescaling("mean", step, context, self.dim, self.keepdim)


def _max_pool(call: Call, dims: int) -> Recognised:
    batched = call.activation()
    if call.module is not None:
        module: Any = call.module
        if module.return_indices:
            raise StaysFloat("it also returns indices")
        kernel, *settings = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
    else:
        kernel = call.get(1, "kernel_size")
        settings = [call.get(2, "stride"), call.get(3, "padding", 0), call.get(4, "dilation", 1),
                    call.get(5, "ceil_mode", False)]  # fmt: skip
    for value in (kernel, *settings):
        call.constant(value, "window")
    return Recognised(MaxPool(per_dimension(kernel, dims), *settings), (batched,))


def _avg_pool(call: Call, dims: int) -> Recognised:
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    defaults = dict(zip(names, (None, None, 0, False, True, None), strict=True))
    if call.module is not None:
        options: dict[str, Any] = {name: getattr(call.module, name, default) for name, default in defaults.items()}
    else:
        settings = [call.get(place, name, default) for place, (name, default) in enumerate(defaults.items(), 1)]
        options = {name: call.constant(value, "window") for name, value in zip(names, settings, strict=True)}
    kernel = per_dimension(options.pop("kernel_size"), dims)
    options["stride"] = kernel if options["stride"] is None else options["stride"]
    return Recognised(AvgPool(kernel, **options), (call.activation(),))


def _adaptive(call: Call, operator: type[AdaptiveAvgPool] | type[AdaptiveMaxPool], dims: int) -> Recognised:
    module: Any = call.module
    if module is not None and getattr(module, "return_indices", False):
        raise StaysFloat("it also returns indices")
    size = call.get(1, "output_size") if module is None else module.output_size
    return Recognised(operator(per_dimension(call.constant(size, "output size"), dims)), (call.activation(),))


recognises(nn.MaxPool1d, F.max_pool1d, torch.max_pool1d)(partial(_max_pool, dims=1))
recognises(nn.MaxPool2d, F.max_pool2d, torch.max_pool2d)(partial(_max_pool, dims=2))
recognises(nn.MaxPool3d, F.max_pool3d, torch.max_pool3d)(partial(_max_pool, dims=3))
recognises(nn.AvgPool1d, F.avg_pool1d)(partial(_avg_pool, dims=1))
recognises(nn.AvgPool2d, F.avg_pool2d)(partial(_avg_pool, dims=2))
recognises(nn.AvgPool3d, F.avg_pool3d)(partial(_avg_pool, dims=3))
recognises(nn.AdaptiveMaxPool1d, F.adaptive_max_pool1d)(partial(_adaptive, operator=AdaptiveMaxPool, dims=1))
recognises(nn.AdaptiveMaxPool2d, F.adaptive_max_pool2d)(partial(_adaptive, operator=AdaptiveMaxPool, dims=2))
recognises(nn.AdaptiveMaxPool3d, F.adaptive_max_pool3d)(partial(_adaptive, operator=AdaptiveMaxPool, dims=3))
recognises(nn.AdaptiveAvgPool1d, F.adaptive_avg_pool1d)(partial(_adaptive, operator=AdaptiveAvgPool, dims=1))
recognises(nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)(partial(_adaptive, operator=AdaptiveAvgPool, dims=2))
recognises(nn.AdaptiveAvgPool3d, F.adaptive_avg_pool3d)(partial(_adaptive, operator=AdaptiveAvgPool, dims=3))


@recognises(torch.mean, "mean")
def mean_over(call: Call) -> Recognised:
    """The mean over dimensions."""
    index = call.activation()
    dim = call.constant(call.get(1, "dim"), "dim")
    if call.node.kwargs.get("dtype") is not None:
        raise StaysFloat("it changes the dtype")
    dims = tuple(range(call.rank(index))) if dim is None else per_dimension(dim, 1)
    return Recognised(Mean(dims, bool(call.get(2, "keepdim", False)), over_all=dim is None), (index,))
