"""Convolutions, pools and batch norms that a model computes in float."""

from __future__ import annotations

from typing import Any

import torch

from quant.onnx.adaptive_pools import adaptive_mean
from quant.onnx.call import WrittenCall, writes_call
from quant.onnx.graph_writer import NotWritten
from quant.ops.call import per_dimension


@writes_call("convolution")
def _convolution(call: WrittenCall) -> str:
    weight = call.get(1, "weight")
    if not isinstance(weight, str) or weight not in call.writer.constants:
        raise NotWritten("is a convolution with a weight that is computed")
    kernel = list(call.writer.constants[weight].shape[2:])
    dims = len(kernel)
    if call.rank() != dims + 2:
        raise NotWritten("is a convolution of one sample without a batch")
    padding, dilation = call.get(4, "padding", 0), list(per_dimension(call.get(5, "dilation", 1), dims))
    if call.get(7, "padding_mode", "zeros") != "zeros":
        raise NotWritten("is a convolution in float that pads otherwise than by zeros")
    inputs = [call.get(0, "input"), weight]
    if call.get(2, "bias") is not None:
        inputs.append(call.get(2, "bias"))
    return call.writer.node(
        "Conv", *inputs,
        kernel_shape=kernel,
        strides=list(per_dimension(call.get(3, "stride", 1), dims)),
        pads=_pads(padding, kernel, dilation),
        dilations=dilation,
        group=call.get(6, "groups", 1),
    )  # fmt: skip


@writes_call("conv_transpose")
def _transposed_convolution(call: WrittenCall) -> str:
    weight = call.get(1, "weight")
    if not isinstance(weight, str) or weight not in call.writer.constants:
        raise NotWritten("is a transposed convolution with a weight that is computed")
    kernel = list(call.writer.constants[weight].shape[2:])
    dims, bias = len(kernel), call.get(2, "bias")
    if call.rank() != dims + 2:
        raise NotWritten("is a transposed convolution of one sample without a batch")
    return call.writer.node(
        "ConvTranspose", call.get(0, "input"), weight, *([] if bias is None else [bias]),
        kernel_shape=kernel,
        strides=list(per_dimension(call.get(3, "stride", 1), dims)),
        pads=list(per_dimension(call.get(4, "padding", 0), dims)) * 2,
        output_padding=list(per_dimension(call.get(5, "output_padding", 0), dims)),
        group=call.get(6, "groups", 1),
        dilations=list(per_dimension(call.get(7, "dilation", 1), dims)),
    )  # fmt: skip


def _pads(padding: Any, kernel: list[int], dilation: list[int]) -> list[int]:
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [*(one // 2 for one in total), *(one - one // 2 for one in total)]
    return list(per_dimension(0 if padding == "valid" else padding, len(kernel))) * 2


@writes_call("batch_norm")
def _batch_norm(call: WrittenCall) -> str:
    writer, x, channels = call.writer, call.get(0, "input"), call.shape()[1]
    mean, variance = call.get(1, "running_mean"), call.get(2, "running_var")
    if call.get(5, "training", False) or mean is None or variance is None or channels is None:
        raise NotWritten("is a batch norm by the statistics of each batch")
    weight, bias = call.get(3, "weight"), call.get(4, "bias")
    weight = writer.constant(torch.ones(channels), "weight") if weight is None else weight
    bias = writer.constant(torch.zeros(channels), "bias") if bias is None else bias
    eps = float(call.get(7, "eps", 1e-5))
    return writer.same_sizes(writer.node("BatchNormalization", x, weight, bias, mean, variance, epsilon=eps), x)


@writes_call("max_pool")
def _max_pool(call: WrittenCall) -> str:
    if call.get(5, "ceil_mode", False) or call.get(6, "return_indices", False):
        raise NotWritten("pools reals with ceil_mode, or returns indices")
    window = _window(call)
    dilations = list(per_dimension(call.get(4, "dilation", 1), len(window["kernel_shape"])))
    return call.writer.node("MaxPool", call.get(0, "input"), **window, dilations=dilations)


@writes_call("avg_pool")
def _avg_pool(call: WrittenCall) -> str:
    if call.get(4, "ceil_mode", False) or call.raw(6, "divisor_override") is not None:
        raise NotWritten("averages reals with ceil_mode or a divisor_override")
    include = bool(call.get(5, "count_include_pad", True))
    return call.writer.node("AveragePool", call.get(0, "input"), **_window(call), count_include_pad=include)


@writes_call("adaptive_avg_pool")
def _adaptive_mean(call: WrittenCall) -> str:
    writer, x, shape = call.writer, call.get(0, "input"), call.shape()
    asked = call.raw(1, "output_size")
    size = list(asked) if isinstance(asked, (tuple, list)) else [asked] * (len(writer.shape(call.out)) - 2)
    if len(shape) != len(size) + 2 or not all(one is None or isinstance(one, int) for one in size):
        raise NotWritten("pools reals without a batch, or to sizes that are computed")
    if set(size) == {1}:
        return writer.same_sizes(writer.node("GlobalAveragePool", x), x, count=2)
    return writer.same_sizes(adaptive_mean(writer, x, shape[2:], size), x, count=2)


def _window(call: WrittenCall) -> dict[str, Any]:
    kernel = list(per_dimension(call.get(1, "kernel_size"), call.rank() - 2))
    stride = call.get(2, "stride")
    strides = kernel if stride is None else list(per_dimension(stride, len(kernel)))
    return {
        "kernel_shape": kernel,
        "strides": strides,
        "pads": list(per_dimension(call.get(3, "padding", 0), len(kernel))) * 2,
    }
