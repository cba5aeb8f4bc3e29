"""Layers that others registered with a form for known ranges (`quant.nn.register_int8`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from quant.int8_classes import LAYERS, Maker, has_static_layer
from quant.leaves import base_layer
from quant.ops.call import Call, StaysFloat
from quant.ops.operator import Operator
from quant.ops.registry import Recognised, recognises_family


@dataclass(frozen=True)
class Registered(Operator):
    """A layer of somebody's, of one tensor in and one out, with a range for each (`StaticQuantModule`).

    Attributes:
        make: what is registered for its class: makes the int8 layer.
    """

    name: ClassVar[str] = "registered"
    anchor: ClassVar[bool] = True
    gives_reals: ClassVar[bool] = True
    make: Maker


@recognises_family(has_static_layer)
def registered(call: Call) -> Recognised:
    """A call of such a layer with its input alone."""
    names = [*[""] * len(call.node.args), *call.node.kwargs]
    if len(names) != 1:
        raise StaysFloat(f"it is called with {len(names)} arguments, and a registered int8 layer takes one tensor")
    input, result = call.activation(0, names[0]), call.node.meta
    if result is None or result.dtype != torch.float32:
        raise StaysFloat(f"it gives {'no tensor' if result is None else result.dtype}, expected torch.float32")
    base = None if call.module is None else base_layer(call.module)
    make = None if base is None else LAYERS.get(base)
    assert make is not None
    return Recognised(Registered(make), (input,))
