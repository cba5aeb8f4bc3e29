"""Resizing by the nearest value or linearly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import nn

from quant.ops.call import Call, StaysFloat
from quant.ops.lowering import Context, Kernel, rescaling
from quant.ops.operator import Operator
from quant.ops.registry import Recognised, recognises
from quant.ops.step import Step

MODES = ("nearest", "nearest-exact", "bilinear", "linear", "trilinear")


@dataclass(frozen=True)
class Interpolate(Operator):
    """Settings as `F.interpolate`'s, None where not given; a size may be a Ref to a value derived from sizes."""

    name: ClassVar[str] = "interpolate"
    size: Any = None
    scale_factor: Any = None
    mode: str = "nearest"
    align_corners: bool | None = None
    recompute_scale_factor: bool | None = None
    antialias: bool | None = None

    def lower(self, step: Step, context: Context) -> Kernel:
        options = {name: getattr(self, name) for name in OPTIONS}
        given_options = {name: value for name, value in options.items() if value is not None}
        return rescaling("interpolate", step, context, **given_options)


OPTIONS = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")


@recognises(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, F.interpolate)
def interpolate(call: Call) -> Recognised:
    """`F.interpolate` and the layers that call it."""
    if call.module is not None:
        options: dict[str, Any] = {name: getattr(call.module, name, None) for name in OPTIONS[:5]}
    else:
        options = {name: call.get(place, name) for place, name in enumerate(OPTIONS, 1)}
    options["mode"] = options["mode"] or "nearest"
    if options["mode"] not in MODES:
        raise StaysFloat(f"interpolation {options['mode']!r} has no int8 kernel")
    return Recognised(Interpolate(**options), (call.activation(),))
