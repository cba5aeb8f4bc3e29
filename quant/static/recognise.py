"""What a captured call means: the integer operator that stands for it, or the reason it stays float.

One table each for modules, functions and methods, from a class or a name to a small function (`recognise_layers.py`,
`recognise_values.py`, `recognise_windows.py`). A new operator is a line here, an entry in `lower.py`, and its reference
in `quant.kernels.reference_ops`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quant.graph import Graph, Node
from quant.static.leaves import base_layer, is_registered
from quant.static.meaning import Call, Handler, Meaning, StaysFloat, called
from quant.static.recognise_layers import (
    added_product,
    conv_function,
    conv_module,
    linear_function,
    linear_module,
    matmul,
    recurrent,
)
from quant.static.recognise_values import batch_norm, batch_norm_function, binary, cat, division, lookup, moved, prelu
from quant.static.recognise_windows import (
    adaptive,
    avg_pool,
    interpolate,
    max_pool,
    mean_over,
    pad_function,
    pad_module,
)


@dataclass(frozen=True)
class Operator:
    """How an operator takes part in quantisation.

    Attributes:
        anchor: worth quantising its inputs for; others become integers only between integers.
        shares: its inputs and its output have one range, because values pass through it unchanged; of a concatenation
            only those inputs that nobody else reads (`joins.py`).
        weighted: has a weight and a bias of its own, and nothing else.
        recurrent: has states, with ranges of their own inside of it (`static/recurrent.py`).
    """

    anchor: bool = False
    shares: bool = False
    weighted: bool = False
    recurrent: bool = False


OPERATORS = {
    "linear": Operator(anchor=True, weighted=True),
    "conv": Operator(anchor=True, weighted=True),
    "conv_transpose": Operator(anchor=True, weighted=True),
    "matmul": Operator(anchor=True),
    "sequence": Operator(anchor=True, recurrent=True),
    "cell": Operator(anchor=True, recurrent=True),
    "lookup": Operator(),
    "add": Operator(),
    "mul": Operator(),
    "cat": Operator(shares=True),
    "pass": Operator(shares=True),
    "pad": Operator(shares=True),
    "max_pool": Operator(shares=True),
    "adaptive_max_pool": Operator(shares=True),
    "avg_pool": Operator(),
    "adaptive_avg_pool": Operator(),
    "mean": Operator(),
    "interpolate": Operator(),
}


def recognise(node: Node, graph: Graph, root: nn.Module) -> Meaning:
    """The integer operator for a call.

    Raises:
        StaysFloat: there is none, with the reason.
    """
    call = Call(node, graph, root)
    if node.kind == "module":
        handler = _module_handler(call)
    elif node.kind == "method":
        handler = METHODS.get(node.target)
    elif node.kind == "function":
        handler = FUNCTIONS.get(node.target)
    else:
        raise StaysFloat("not a computation")
    if handler is None:
        raise StaysFloat(f"{called(node, root)} has no int8 kernel")
    return handler(call)


def _module_handler(call: Call) -> Handler | None:
    module = call.module
    assert module is not None
    if is_registered(module):
        raise StaysFloat("registered as a layer of its own; it runs as it is")
    base = base_layer(module)
    return None if base is None else MODULES.get(base)


MODULES: dict[type[nn.Module], Handler] = {
    nn.Linear: linear_module,
    nn.modules.linear.NonDynamicallyQuantizableLinear: linear_module,
    **dict.fromkeys(
        (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), conv_module
    ),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), batch_norm),
    **dict.fromkeys(
        (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.ELU, nn.SELU, nn.CELU,
         nn.Mish, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardshrink, nn.Softshrink, nn.Threshold),
        lookup,
    ),
    **dict.fromkeys((nn.Sigmoid, nn.Hardsigmoid, nn.Tanh), lookup),
    nn.PReLU: prelu,
    **dict.fromkeys(
        (nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
         nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
        moved,
    ),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), recurrent("sequence")),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), recurrent("cell")),
    nn.MaxPool1d: max_pool(1), nn.MaxPool2d: max_pool(2), nn.MaxPool3d: max_pool(3),
    nn.AvgPool1d: avg_pool(1), nn.AvgPool2d: avg_pool(2), nn.AvgPool3d: avg_pool(3),
    nn.AdaptiveAvgPool1d: adaptive("adaptive_avg_pool", 1), nn.AdaptiveAvgPool2d: adaptive("adaptive_avg_pool", 2),
    nn.AdaptiveAvgPool3d: adaptive("adaptive_avg_pool", 3),
    nn.AdaptiveMaxPool1d: adaptive("adaptive_max_pool", 1), nn.AdaptiveMaxPool2d: adaptive("adaptive_max_pool", 2),
    nn.AdaptiveMaxPool3d: adaptive("adaptive_max_pool", 3),
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), interpolate),
    **dict.fromkeys((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
                    pad_module("constant")),
    **dict.fromkeys((nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d), pad_module("reflect")),
    **dict.fromkeys((nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d), pad_module("replicate")),
    **dict.fromkeys((nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d), pad_module("circular")),
}  # fmt: skip
"""Layers of torch.nn, subclasses of which count where they compute the same."""

FUNCTIONS: dict[Callable[..., Any], Handler] = {
    F.linear: linear_function,
    F.batch_norm: batch_norm_function,
    torch.conv1d: conv_function(1), torch.conv2d: conv_function(2), torch.conv3d: conv_function(3),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, operator.matmul), matmul),
    torch.addmm: added_product,
    **dict.fromkeys(
        (F.relu, torch.relu, torch.relu_, F.relu6, F.hardtanh, F.hardswish, F.leaky_relu, F.silu, F.gelu, F.elu, F.selu,
         F.celu, F.mish, F.softplus, F.hardshrink, F.softshrink, torch.clamp, torch.clip, torch.neg, operator.neg,
         torch.abs, operator.abs),
        lookup,
    ),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, F.hardsigmoid, torch.tanh, F.tanh), lookup),
    **dict.fromkeys((operator.add, operator.iadd, torch.add), binary("add")),
    **dict.fromkeys((operator.sub, operator.isub, torch.sub), binary("add", -1)),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, torch.multiply), binary("mul")),
    **dict.fromkeys((operator.truediv, operator.itruediv, torch.div), division),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.stack), cat),
    **dict.fromkeys(
        (torch.flatten, torch.reshape, torch.permute, torch.transpose, torch.swapaxes, torch.movedim, torch.squeeze,
         torch.unsqueeze, torch.chunk, torch.split, torch.unbind, torch.tensor_split, operator.getitem, F.dropout,
         F.dropout1d, F.dropout2d, F.dropout3d, F.pixel_shuffle, F.pixel_unshuffle, torch.channel_shuffle, torch.roll,
         torch.flip, torch.narrow, torch.repeat_interleave),
        moved,
    ),
    F.max_pool1d: max_pool(1), F.max_pool2d: max_pool(2), F.max_pool3d: max_pool(3),
    torch.max_pool1d: max_pool(1), torch.max_pool2d: max_pool(2), torch.max_pool3d: max_pool(3),
    F.avg_pool1d: avg_pool(1), F.avg_pool2d: avg_pool(2), F.avg_pool3d: avg_pool(3),
    F.adaptive_avg_pool1d: adaptive("adaptive_avg_pool", 1), F.adaptive_avg_pool2d: adaptive("adaptive_avg_pool", 2),
    F.adaptive_avg_pool3d: adaptive("adaptive_avg_pool", 3),
    F.adaptive_max_pool1d: adaptive("adaptive_max_pool", 1), F.adaptive_max_pool2d: adaptive("adaptive_max_pool", 2),
    F.adaptive_max_pool3d: adaptive("adaptive_max_pool", 3),
    torch.mean: mean_over,
    F.interpolate: interpolate,
    F.pad: pad_function, torch._C._nn.pad: pad_function,
}  # fmt: skip

METHODS: dict[str, Handler] = {
    **dict.fromkeys(("matmul", "mm", "bmm"), matmul),
    **dict.fromkeys(("relu", "relu_", "clamp", "clamp_", "clip", "neg", "abs"), lookup),
    **dict.fromkeys(("sigmoid", "sigmoid_", "tanh", "tanh_"), lookup),
    **dict.fromkeys(("add", "add_"), binary("add")),
    **dict.fromkeys(("sub", "sub_"), binary("add", -1)),
    **dict.fromkeys(("mul", "mul_"), binary("mul")),
    **dict.fromkeys(("div", "div_"), division),
    **dict.fromkeys(
        ("view", "reshape", "flatten", "permute", "transpose", "squeeze", "unsqueeze", "contiguous", "chunk", "split",
         "unbind", "tensor_split", "expand", "repeat", "clone", "detach", "swapaxes", "movedim", "narrow", "unflatten",
         "roll", "flip", "view_as", "reshape_as", "t"),
        moved,
    ),
    "mean": mean_over,
}  # fmt: skip
