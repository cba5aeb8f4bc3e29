"""Padding, with zeros or with the input's own values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from quant.ops.call import Call, StaysFloat
from quant.ops.lowering import Context, Kernel
from quant.ops.operator import Operator
from quant.ops.planning import Lines, PlanCall
from quant.ops.registry import Recognised, recognises
from quant.ops.step import Step
from quant.runtime.trees import leaves


@dataclass(frozen=True)
class Pad(Operator):
    """Widths and mode as `F.pad` takes them; a width may be a Ref to what follows from sizes."""

    name: ClassVar[str] = "pad"
    shares_range: ClassVar[bool] = True
    widths: Any = ()
    mode: str = "constant"

    def lower(self, step: Step, context: Context) -> Kernel:
        value = step.inputs[0]
        source, widths = context.integers(value), context.with_sizes(self.widths)
        return Kernel("pad", (source, widths, self.mode, context.zero_point(value)))

    def plan_real(self, call: PlanCall) -> Lines | None:
        """A float value with zeros or values of its own around it."""
        if not all(map(_is_width, leaves(self.widths))):
            return None
        module = call.module
        if module is not None and (module._forward_hooks or module._forward_pre_hooks):
            return None
        return [("pad", {"q": call.tensor(), "widths": self.widths, "mode": self.mode, "fill": 0})]


def _is_width(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


@recognises(F.pad, torch._C._nn.pad)
def pad_function(call: Call) -> Recognised:
    """`F.pad` with zeros or with the input's own values."""
    mode, value = call.get(2, "mode", "constant"), call.get(3, "value")
    if value not in (None, 0, 0.0):
        raise StaysFloat("it pads with a value other than zero")
    return Recognised(Pad(call.get(1, "pad"), mode), (call.activation(),))


@recognises(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
def constant_pad(call: Call) -> Recognised:
    """Layers that pad with a constant."""
    return _pad_module(call, "constant")


@recognises(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d)
def reflection_pad(call: Call) -> Recognised:
    """Layers that pad with the values before the edge, mirrored."""
    return _pad_module(call, "reflect")


@recognises(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d)
def replication_pad(call: Call) -> Recognised:
    """Layers that pad with the value at the edge."""
    return _pad_module(call, "replicate")


@recognises(nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d)
def circular_pad(call: Call) -> Recognised:
    """Layers that pad with the values from the other end."""
    return _pad_module(call, "circular")


def _pad_module(call: Call, mode: str) -> Recognised:
    module: Any = call.module
    if getattr(module, "value", 0.0) != 0:
        raise StaysFloat("it pads with a value other than zero")
    return Recognised(Pad(tuple(module.padding), mode), (call.activation(),))
