"""Recurrent networks and their cells, of every kind, and the ranges inside of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from quant.ops.call import Call
from quant.ops.operator import Recurrent
from quant.ops.registry import Recognised, recognises_family
from quant.recurrent_layers import is_cell, is_recurrent_class, sizes_of
from quant.runtime.names import attribute
from quant.runtime.trees import PackedParts


@dataclass(frozen=True)
class Sequence(Recurrent):
    """A network over a sequence. Its value is the first item of its result, the output sequence; states stay float."""

    name: ClassVar[str] = "sequence"


@dataclass(frozen=True)
class Cell(Recurrent):
    """One step of a network; the user's loop carries its state as a float."""

    name: ClassVar[str] = "cell"


@recognises_family(is_recurrent_class)
def recurrent(call: Call) -> Recognised:
    """A recurrent network or a cell."""
    input, module = call.get(0, "input"), attribute(call.root, call.node.target)
    if isinstance(input, PackedParts):
        call = Call(replace(call.node, args=(input.data, *call.node.args[1:])), call.graph, call.root)
    operator = Cell if is_cell(module) else Sequence
    return Recognised(operator(tuple(range_names(module))), (call.activation(),))


def state_range(layer: int) -> str:
    """The name of the range of a layer's states; both directions share it, as the next layer reads both."""
    return f"h_l{layer}"


def product_range(layer: int) -> str:
    """The name of the range of a layer's h before projection (`proj_size`)."""
    return f"m_l{layer}"


def range_names(module: nn.Module) -> list[str]:
    """The ranges inside a float recurrent layer, the same for every kind; the last state's range is the output's."""
    sizes = sizes_of(module)
    layers = range(sizes.num_layers)
    projected = [product_range(layer) for layer in layers] if sizes.proj_size else []
    return [*projected, *(state_range(layer) for layer in layers)]
