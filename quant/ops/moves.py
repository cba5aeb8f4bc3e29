"""What moves values or leaves some out, and changes none."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from quant.graph import Node, Ref
from quant.ops.call import Call, StaysFloat, check_reals, function_name
from quant.ops.lowering import Context, Moved
from quant.ops.operator import Operator
from quant.ops.registry import Recognised, recognises
from quant.ops.step import Step

DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
"""Functions of torch that are told whether to drop; those of `nn` ask their module."""

SPLITTING = {"chunk", "split", "unbind", "tensor_split", "split_with_sizes"}


@dataclass(frozen=True)
class Move(Operator):
    """The same values elsewhere: a view, a copy, a part."""

    name: ClassVar[str] = "pass"
    shares_range: ClassVar[bool] = True

    def lower(self, step: Step, context: Context) -> Moved:
        return Moved()


@recognises(
    nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, torch.flatten, torch.reshape, torch.permute,
    torch.transpose, torch.swapaxes, torch.movedim, torch.squeeze, torch.unsqueeze, torch.chunk, torch.split,
    torch.unbind, torch.tensor_split, operator.getitem, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d,
    F.pixel_shuffle, F.pixel_unshuffle, torch.channel_shuffle, torch.roll, torch.flip, torch.narrow,
    torch.repeat_interleave, "view", "reshape", "flatten", "permute", "transpose", "squeeze", "unsqueeze",
    "contiguous", "chunk", "split", "unbind", "tensor_split", "expand", "repeat", "clone", "detach", "swapaxes",
    "movedim", "narrow", "unflatten", "roll", "flip", "view_as", "reshape_as", "t",
)  # fmt: skip
def moved(call: Call) -> Recognised:
    """A call of an activation, or of the parts that another one made of it."""
    if call.node.target in DROPOUTS and call.get(2, "training", True) is True:
        raise StaysFloat("it drops values in eval mode too")
    moved = call.get(0, "input")
    if not isinstance(moved, Ref):
        raise StaysFloat("its input is no activation")
    source = call.graph.nodes[moved.index]
    if source.meta is not None:
        check_reals(source.meta)
    if source.meta is None and not _splits(source):
        raise StaysFloat("its input is no tensor")
    return Recognised(Move(), (moved.index,))


def _splits(node: Node) -> bool:
    """Whether a node's value is a tuple of parts of one tensor."""
    return node.kind in ("function", "method") and function_name(node) in SPLITTING
