"""Functions of one value, computed by a table of 256 entries: activations, batch norms that are not folded."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.folding import Affine, is_own_norm, norm_arguments, parameter
from quant.graph import evaluate
from quant.ops.call import Call, StaysFloat
from quant.ops.lowering import Context, Kernel
from quant.ops.operator import Interval, Operator
from quant.ops.registry import Recognised, recognises
from quant.ops.step import Step
from quant.runtime.trees import Attr, Ref

INFINITY = float("inf")


@dataclass(frozen=True)
class Lookup(Operator):
    """A function of one value.

    Attributes:
        per_channel: whether it differs by channel (axis 1 of the input).
        clamp: the interval, where the function is only a clamp; the step before can clamp instead.
        is_batch_norm: whether it is a batch norm with running statistics; a weighted step before it can absorb it.
        affine: the channel scale or shift, where it is one with constants of the model; likewise.
        only_folded: whether it can only be folded, and has no table.
        gives_input: whether it gives the value itself, as a product with 1 does.
    """

    name: ClassVar[str] = "lookup"
    kernel: ClassVar[str] = "lookup"
    per_channel: bool = False
    clamp: Interval | None = None
    is_batch_norm: bool = False
    affine: Affine | None = None
    only_folded: bool = False
    gives_input: bool = False

    @property
    def needs_rank(self) -> bool:
        return self.per_channel

    def lower(self, step: Step, context: Context) -> Kernel:
        known = context.tables.get(step.name)
        table = self.table(step, context) if known is None else known
        return Kernel(self.kernel, (context.integers(step.inputs[0]), table))

    def table(self, step: Step, context: Context) -> Tensor:
        """The uint8 results for the 256 inputs, (256,) or (channels, 256): the step's float function, rounded."""
        source, target = context.ranges[step.inputs[0]], context.ranges[step.output]
        x = source.dequantize(torch.arange(256, dtype=torch.uint8))
        meta = context.graph.nodes[step.inputs[0]].meta
        assert meta is not None
        channels = meta.shape[1] if self.per_channel else None
        if channels is not None:
            rest = len(meta.shape) - 2
            x = x.reshape(256, 1, *[1] * rest).expand(256, channels, *[1] * rest).clone()
        own: dict[int, Any] = {step.inputs[0]: x}

        def value(index: int) -> Any:
            return own[index] if index in own else parameter(Ref(index), context.graph, context.root)

        with torch.no_grad():
            for index in step.nodes:
                own[index] = evaluate(context.graph.nodes[index], context.root, value)
        y = target.quantize(own[step.output])
        return y if channels is None else y.reshape(256, channels).t().contiguous()


@recognises(
    nn.Hardswish, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.ELU, nn.SELU, nn.CELU, nn.Mish, nn.Softplus, nn.Softsign,
    nn.LogSigmoid, nn.Hardshrink, nn.Softshrink, nn.Threshold, nn.Sigmoid, nn.Hardsigmoid, nn.Tanh, F.hardswish,
    F.leaky_relu, F.silu, F.gelu, F.elu, F.selu, F.celu, F.mish, F.softplus, F.hardshrink, F.softshrink, torch.neg,
    operator.neg, torch.abs, operator.abs, torch.sigmoid, F.sigmoid, F.hardsigmoid, torch.tanh, F.tanh, "neg", "abs",
    "sigmoid", "sigmoid_", "tanh", "tanh_",
)  # fmt: skip
def activation(call: Call) -> Recognised:
    """A function of one value."""
    return _function(call, None)


@recognises(nn.ReLU, F.relu, torch.relu, torch.relu_, "relu", "relu_")
def relu(call: Call) -> Recognised:
    """A clamp from below."""
    return _function(call, (0.0, INFINITY))


@recognises(nn.ReLU6, F.relu6)
def relu6(call: Call) -> Recognised:
    """A clamp to 0 and 6."""
    return _function(call, (0.0, 6.0))


@recognises(nn.Hardtanh, F.hardtanh)
def hardtanh(call: Call) -> Recognised:
    """A clamp to numbers, by default -1 and 1."""
    layer: Any = call.module
    if layer is not None:
        return _function(call, (layer.min_val, layer.max_val))
    return _function(call, (call.get(1, "min_val", -1.0), call.get(2, "max_val", 1.0)))


@recognises(torch.clamp, torch.clip, "clamp", "clamp_", "clip")
def clamp(call: Call) -> Recognised:
    """A clamp to numbers on both sides or one."""
    low, high = call.get(1, "min"), call.get(2, "max")
    _check_settled(call)
    if isinstance(low, (Tensor, Attr)) or isinstance(high, (Tensor, Attr)):
        raise StaysFloat("clamps to tensors")
    return _function(call, (-INFINITY if low is None else float(low), INFINITY if high is None else float(high)))


def _function(call: Call, clamp: Interval | None) -> Recognised:
    """A function of one value, with the interval where it is only a clamp."""
    _check_settled(call)
    return Recognised(Lookup(clamp=clamp), (call.activation(),))


def _check_settled(call: Call) -> None:
    if any(isinstance(setting, Ref) for setting in [*call.node.args[1:], *call.node.kwargs.values()]):
        raise StaysFloat("a setting of it is computed at run time")


@recognises(nn.PReLU)
def prelu(call: Call) -> Recognised:
    """`nn.PReLU`, with a slope for all or one per channel."""
    module: Any = call.module
    return Recognised(Lookup(per_channel=module.num_parameters > 1), (call.activation(),))


@recognises(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(call: Call) -> Recognised:
    """A batch norm with running statistics."""
    module: Any = call.module
    if module.running_mean is None:
        raise StaysFloat("it normalises by the statistics of each batch")
    return Recognised(Lookup(per_channel=True, is_batch_norm=True), (call.activation(),))


@recognises(F.batch_norm)
def batch_norm_function(call: Call) -> Recognised:
    """`F.batch_norm` with running statistics of the model."""
    if not is_own_norm(call.node, call.graph) or isinstance(norm_arguments(call.node)["eps"], Ref):
        raise StaysFloat("it normalises by the statistics of each batch, or by what is computed from the input")
    return Recognised(Lookup(per_channel=True, is_batch_norm=True), (call.activation(),))
