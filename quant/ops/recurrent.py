"""Recurrent networks and their cells, of every kind, and the ranges inside of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from quant.kernels.reference_plan import Register
from quant.ops.call import Call
from quant.ops.operator import Recurrent
from quant.ops.planning import Opened, PlanCall, TupleOf, Unplanned
from quant.ops.registry import Recognised, recognises_family
from quant.recurrent_layers import is_cell, is_recurrent_class, sizes_of
from quant.runtime.layers.recurrent_module import Int8Cell
from quant.runtime.names import attribute
from quant.runtime.recurrent_lines import CellLines, RecurrentLines
from quant.runtime.trees import PackedParts, Ref


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


OTHERWISE = "it has hooks, a forward of the user's, or a kind without a kernel"


def planned(call: PlanCall, integers: bool) -> Opened | CellLines:
    """The lines of an int8 network or cell, static or dynamic.

    Args:
        integers: whether the sequence that a network gives is uint8.

    Raises:
        Unplanned: its input is packed, or the module computes by itself.
    """
    return step(call) if isinstance(call.module, Int8Cell) else opened(call, integers)


def step(call: PlanCall) -> Opened | CellLines:
    """The lines of a cell; where it has two states, the tuple of them."""
    assert isinstance(call.module, Int8Cell)
    x, states = call.tensor(), _first_states(call)
    direction: Any = call.module.direction
    kind = direction._kind
    reads = (x.index, *(one.index for one in states))
    # Its lines refuse an input of another number of dimensions, so they need not be held to the captured one.
    rank = len(call.values.captured_shape(x.index))
    lines = CellLines(call.out, reads, call.node.target, rank, 2 if kind.has_cell else 1)
    if not lines.holds(call.module):
        raise Unplanned(OTHERWISE)
    if lines.states == 1:
        return lines
    h, c = map(Register, lines.outs)
    return Opened(lines, TupleOf(x.index, 0, 2, (h, c)))


def opened(call: PlanCall, integers: bool) -> Opened:
    """The lines of an int8 network, static or dynamic, and the tuple that it gives.

    Args:
        integers: whether the sequence that it gives is uint8.

    Raises:
        Unplanned: its input is packed, or the module computes by itself.
    """
    assert call.module is not None
    x, states = call.tensor(), _first_states(call)
    reads = (x.index, *(one.index for one in states))
    lines = RecurrentLines(call.out, reads, call.node.target, len(call.values.shape(x)), integers)
    if not lines.holds(call.module):
        raise Unplanned(OTHERWISE)
    y, h, c = map(Register, lines.outs)
    two_states: bool = call.module.directions[0]._kind.has_cell  # type: ignore[index,union-attr]
    finals = TupleOf(x.index, 0, 2, (h, c)) if two_states else h
    return Opened(lines, TupleOf(x.index, 0, 2, (y, finals)))


def _first_states(call: PlanCall) -> list[Register]:
    given = call.argument(1, "hx")
    if given is None:
        return []
    if isinstance(given, (tuple, list)):
        if not all(isinstance(one, Ref) for one in given):
            raise Unplanned("its state is no activation")
        return [call.values.tensor(one) for one in given]
    known = call.values.symbol(given) if isinstance(given, Ref) else None
    if not isinstance(known, TupleOf):
        return [call.tensor(1, "hx")]
    if not all(isinstance(one, Register) for one in known.items):
        raise Unplanned("this use of a tuple has no plan")
    return [one for one in known.items if isinstance(one, Register)]


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
