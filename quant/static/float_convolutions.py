"""How calibration computes float convolutions: another way than torch's, where that gives torch's bits in less time.

For a depthwise convolution oneDNN lays its input and output out anew, in memory that the system hands out page by
page; ours takes images as they lie. And on one thread, for fewer than 16 samples, torch computes a 1x1 convolution as a
product of matrices by its BLAS (`use_mkldnn` in aten/src/ATen/native/Convolution.cpp), which leaves AVX-512 aside on
some CPUs; oneDNN does not. Whether one adds in the same order as the other depends on the CPU, the versions and the
depth, so it is tried.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.graph import Kind, Node
from quant.kernels.ops import extension_problem
from quant.kernels.reference_conv import MOST_REACH
from quant.ops.conv import Conv
from quant.ops.operator import Operator
from quant.runtime.module_calls import is_untouched
from quant.runtime.names import submodule
from quant.runtime.trees import Ref

TRIED_AT = 8
"""The call of a shape in which both ways are tried. A trial costs two convolutions and saves a part of one in each
later call, so short calibrations are left alone."""

WORTH = 0.05
"""Share of torch's time that the other way has to save."""

MOST_SHAPES = 64
"""Shapes of which something is remembered; with more, all are forgotten."""


@dataclass(frozen=True)
class Way:
    """Another way than torch's.

    Attributes:
        takes: whether a convolution is of its kind, given the module too.
        differs: whether torch would not do the same for an input of this many samples.
        compute: the convolution of an input with the module's weight and bias.
    """

    takes: Callable[[Conv, nn.Conv2d], bool]
    differs: Callable[[int], bool]
    compute: Callable[[Conv, nn.Conv2d, Tensor], Tensor]


class FloatConvolution:
    """The convolution of one node, and for each shape of its input the way that a trial has found.

    The numbers are torch's to the bit: what adds in another order than torch on one batch is not used, and the order
    does not depend on the values.
    """

    def __init__(self, node: Node, operator: Conv, way: Way) -> None:
        self._target = node.target
        self._operator = operator
        self._way = way
        self._calls: dict[Any, int] = {}
        self._is_better: dict[Any, bool] = {}

    def __call__(self, root: nn.Module, x: Any) -> Tensor | None:
        """The convolution of x; None where torch has to compute it."""
        conv: Any = submodule(root, self._target)
        if not _is_open_to_choice(conv, x) or not self._way.differs(len(x)):
            return None
        key = (x.shape, _settings())
        better = self._is_better.get(key)
        if better is None:
            return self._counted(key, conv, x)
        return self._way.compute(self._operator, conv, x) if better else None

    def _counted(self, key: Any, conv: Any, x: Tensor) -> Tensor | None:
        if len(self._calls) >= MOST_SHAPES and key not in self._calls:
            self._calls.clear()
            self._is_better.clear()
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] < TRIED_AT:
            return None
        expected, seconds = _timed(conv, x)
        if not _is_flat(expected):
            compute = functools.partial(self._way.compute, self._operator)
            same = torch.equal(compute(conv, x), expected)  # whose first call may make its code
            self._is_better[key] = same and _timed(compute, conv, x)[1] < (1 - WORTH) * seconds
        return expected


def float_convolution_of(node: Node, operator: Operator | None, root: nn.Module) -> FloatConvolution | None:
    """The choice at the node that begins a step; None where there is none."""
    if node.kind is not Kind.MODULE or not isinstance(operator, Conv) or operator.pad_before is not None:
        return None
    conv = submodule(root, node.target)
    if type(conv) is not nn.Conv2d or len(node.args) != 1 or type(node.args[0]) is not Ref or node.kwargs:
        return None
    way = next((way for way in WAYS if way.takes(operator, conv)), None)
    return None if way is None else FloatConvolution(node, operator, way)


def _is_pointwise(operator: Conv, conv: nn.Conv2d) -> bool:
    sides = zip(conv.kernel_size, operator.stride, operator.padding, strict=True)
    return operator.groups == 1 and all(side == (1, 1, 0) for side in sides) and torch.backends.mkldnn.is_available()


def _by_onednn(operator: Conv, conv: nn.Conv2d, x: Tensor) -> Tensor:
    places = operator.padding, operator.stride, operator.dilation
    return torch.mkldnn_convolution(x, conv.weight, conv.bias, *places, operator.groups)


def _takes_blas(samples: int) -> bool:
    return samples < 16 and torch.get_num_threads() == 1


def _is_depthwise(operator: Conv, conv: nn.Conv2d) -> bool:
    reaches = (taps * apart for taps, apart in zip(conv.kernel_size, operator.dilation, strict=True))
    return (
        operator.groups == conv.in_channels == conv.out_channels > 1
        and max(*operator.stride, *operator.padding, *reaches) <= MOST_REACH
        and not extension_problem()
    )


def _by_ours(operator: Conv, conv: nn.Conv2d, x: Tensor) -> Tensor:
    places = operator.stride, operator.padding, operator.dilation
    y: Tensor = torch.ops.octet.depthwise_f32(x, conv.weight, conv.bias, *places)
    return y


WAYS = (Way(_is_pointwise, _takes_blas, _by_onednn), Way(_is_depthwise, lambda samples: True, _by_ours))


def _is_open_to_choice(conv: Any, x: Any) -> bool:
    """Whether nobody watches the call, and it is of the plain kind."""
    return (
        type(x) is Tensor
        and x.dim() == 4
        and x.dtype == torch.float32
        and x.is_cpu
        and x.is_contiguous()
        and x.numel() > 0
        and not torch.is_grad_enabled()
        and type(conv) is nn.Conv2d
        and is_untouched(conv)
        and x.shape[1] == conv.in_channels
        and all(one is None or _is_dense(one) for one in (conv.weight, conv.bias))
        and not torch.is_autocast_enabled("cpu")
    )


def _is_dense(one: Tensor) -> bool:
    known = type(one) in (Tensor, nn.Parameter) and one.dtype == torch.float32 and one.is_cpu
    return known and bool(one.is_contiguous())


def _settings() -> tuple[Any, ...]:
    """What a user may set of how torch computes a convolution."""
    onednn: Any = torch.backends.mkldnn
    return torch.get_num_threads(), onednn.enabled, onednn.conv.fp32_precision


def _timed(compute: Callable[..., Tensor], *args: Any) -> tuple[Tensor, float]:
    """A result, and its seconds: of this thread alone, where it works alone."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    return compute(*args), clock() - start


def _is_flat(y: Tensor) -> bool:
    """Whether it says nothing of an order of adding: values that are all one number, or not numbers."""
    low, high = torch.aminmax(y)
    return not bool(low < high)
