"""Calls that move values or leave some out, and change none.

Each is a `Move`: on integers it is the captured call itself. Those that a plan has operations for are in `views.py`,
`slices.py` and `idle.py`; the others are listed here. To add one takes a class with its `plan`, and a function that
recognises it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from quant.graph import Node
from quant.ops.call import Call, StaysFloat, check_reals, is_call_of
from quant.ops.lowering import Context, Moved
from quant.ops.operator import Operator
from quant.ops.registry import Recognised, recognises
from quant.ops.step import Step
from quant.runtime.trees import Ref

SPLITS = frozenset({
    torch.chunk, torch.split, torch.unbind, torch.tensor_split, torch.split_with_sizes, "chunk", "split", "unbind",
    "tensor_split", "split_with_sizes",
})  # fmt: skip
"""Calls that give a tuple of parts of one tensor (`slices.py`)."""


@dataclass(frozen=True)
class Move(Operator):
    """The same values elsewhere: a view, a copy, a part.

    Attributes:
        idle: in eval mode it gives its input itself.
        planned_in_reals: float values are moved natively too, between integers (`plan` serves both).
    """

    name: ClassVar[str] = "pass"
    shares_range: ClassVar[bool] = True
    idle: ClassVar[bool] = False
    planned_in_reals: ClassVar[bool] = False

    def lower(self, step: Step, context: Context) -> Moved:
        return Moved()

    def on_integers(self, node: Node, kwargs: dict[str, Any]) -> tuple[Node, dict[str, Any]]:
        """The call that moves integers, which may lie in another memory format than the reals did."""
        return node, kwargs


def moved(operator: Operator, call: Call) -> Recognised:
    """`operator`, of a call of an activation, or of the parts that another call made of one."""
    value = call.get(0, "input")
    if not isinstance(value, Ref):
        raise StaysFloat("its input is no activation")
    source = call.graph.nodes[value.index]
    if source.meta is not None:
        check_reals(source.meta)
    if source.meta is None and not is_call_of(source, SPLITS):
        raise StaysFloat("its input is no tensor")
    return Recognised(operator, (value.index,))


def listed(call: Call, name: str) -> tuple[Any, ...]:
    """Settings after the input that are given one by one, as one list, or by name."""
    given = call.node.args[1:] or (call.node.kwargs.get(name, ()),)
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else tuple(given)


@recognises(
    nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, F.pixel_shuffle, F.pixel_unshuffle, torch.channel_shuffle,
    torch.movedim, torch.roll, torch.flip, torch.repeat_interleave, "movedim", "roll", "flip", "expand", "repeat", "t",
)  # fmt: skip
def move(call: Call) -> Recognised:
    """Moves that no plan has operations for."""
    return moved(Move(), call)
