"""Recurrent networks and their cells."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from quant.graph import PackedParts, attribute
from quant.ops.call import Call
from quant.ops.operator import Recurrent
from quant.ops.registry import Recognised, recognises

CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)


@dataclass(frozen=True)
class Sequence(Recurrent):
    """A network over a sequence. Its value is what it gives first, the output sequence; the states stay float."""

    name: ClassVar[str] = "sequence"


@dataclass(frozen=True)
class Cell(Recurrent):
    """One step of a network, whose state goes round in the user's loop as a float."""

    name: ClassVar[str] = "cell"


@recognises(nn.LSTM, nn.GRU, nn.RNN)
def sequence(call: Call) -> Recognised:
    """A recurrent network."""
    return _recurrent(call, Sequence)


@recognises(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
def cell(call: Call) -> Recognised:
    """A cell."""
    return _recurrent(call, Cell)


def _recurrent(call: Call, operator: type[Sequence] | type[Cell]) -> Recognised:
    given = call.get(0, "input")
    if isinstance(given, PackedParts):
        call = Call(replace(call.node, args=(given.data, *call.node.args[1:])), call.graph, call.root)
    return Recognised(operator(tuple(range_names(attribute(call.root, call.node.target)))), (call.activation(),))


def state_range(layer: int) -> str:
    """The name of the range that the states of a layer have, of both directions, as the next layer reads both."""
    return f"h_l{layer}"


def product_range(layer: int) -> str:
    """The name of the range of o * tanh(c), which an LSTM's projection reads."""
    return f"m_l{layer}"


def is_cell(module: nn.Module) -> bool:
    """Whether a recurrent layer is one step and not a sequence; its own forward may be a runner's."""
    return isinstance(module, CELLS)


def range_names(module: nn.Module) -> list[str]:
    """The ranges inside of a float recurrent layer; the last state's is the output's."""
    if is_cell(module):
        return [state_range(0)]
    assert isinstance(module, nn.RNNBase)
    layers = range(module.num_layers)
    projected = [product_range(layer) for layer in layers] if module.proj_size else []
    return [*projected, *(state_range(layer) for layer in layers)]
