"""Which float calls between integers have a native form: layer norms, attention, sums, and moves of their values.

They stay float32 and mean what torch's mean. A layer norm and attention add in another order, so their last bits
differ; therefore they are native wherever the kernels are, in a planned run and step by step alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from quant.capture.calls import says_it_writes
from quant.graph import Graph, Node, Ref, attribute
from quant.kernels.reference_plan import Line, Register

if TYPE_CHECKING:
    from quant.static.plannable_moves import Made, Move


class Unplanned(Exception):
    """An instruction runs step by step; the message says why."""


@dataclass(frozen=True)
class ModuleCall:
    """A call of a float module of the user's, whose parameters and mode are read when it runs.

    The native call keeps a copy of the parameters for as long as their versions stay, so a write that torch does not
    count, as through `weight.data`, is not seen.

    Attributes:
        out, source: registers.
        path: of the module.
        op: "layer_norm"; "same" for one that does nothing in eval mode; "attention" for what a MultiheadAttention
            computes between its projections, which drops weights in training mode.
        line: of an attention, all of it.
    """

    out: int
    source: int
    path: str
    op: str
    line: Line | None = None

    def holds(self, module: nn.Module) -> bool:
        """Whether the module may be computed natively: not hooked, and what it was when the model was converted."""
        if self.op == "attention":
            return not module.training
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return False
        if self.op == "same":
            return type(module) in IDLE and not module.training
        return type(module) is nn.LayerNorm and len(module.normalized_shape) == 1


BEFORE = Register(-1)
"""In a call that becomes several lines: what the line before gives."""

IDLE = (nn.Dropout, nn.Identity)
"""Modules that do nothing in eval mode."""

MOVES = ("view", "reshape", "flatten", "Flatten", "permute", "transpose", "swapaxes", "unsqueeze", "squeeze",
         "unflatten", "Unflatten", "chunk", "getitem", "contiguous")  # fmt: skip
"""Calls that only move reals. A planned run copies where torch makes a view, which nobody sees while nobody writes."""


def writes_in_place(graph: Graph, root: nn.Module) -> bool:
    """Whether some call of the graph writes to a value that another one may be a view of."""
    users = graph.users()
    for node in graph.nodes:
        if node.kind in ("function", "method", "module"):
            module = attribute(root, node.target) if node.kind == "module" else None
            writes = says_it_writes(node.kind, node.target, node.kwargs, module)
            if writes and not _fills_new(node, graph, users):
                return True
    return False


def _fills_new(node: Node, graph: Graph, users: dict[int, list[int]]) -> bool:
    """Whether a call writes to what was made for it and nobody else reads, as torch fills masks."""
    if not node.args or not isinstance(node.args[0], Ref):
        return False
    made = node.args[0].index
    return users[made] == [node.index] and graph.nodes[made].target is torch.zeros_like


def module_call(move: Move, out: int) -> ModuleCall:
    """A layer norm, or a dropout that does nothing in eval mode."""
    op = "same" if type(move.module) in IDLE else "layer_norm"
    call = ModuleCall(out, move.source().index, move.node.target, op)
    if len(move.args) != 1 or move.kwargs or not call.holds(move.module):
        raise Unplanned("it is computed in float")
    for tensor in (getattr(move.module, "weight", None), getattr(move.module, "bias", None)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise Unplanned("it is computed in float")
    return call


def _operand(move: Move, place: int, name: str) -> Register:
    found = move.args[place] if place < len(move.args) else move.kwargs.get(name)
    if not isinstance(found, Ref):
        raise Unplanned("it is computed in float")
    move.planner.check_tensor(found)
    return Register(found.index)


def _add(move: Move) -> Made:
    if len(move.args) + len(move.kwargs) != 2:
        raise Unplanned("it is computed in float")
    return [("add_f32", {"a": _operand(move, 0, "input"), "b": _operand(move, 1, "other")})]


def _attention(move: Move) -> Made:
    """Without dropout; a mask is of float32. Batches must be equal as captured, as only sizes of 1 are repeated."""
    q, k, v = (_operand(move, place, name) for place, name in enumerate(("query", "key", "value")))
    shapes = [move.planner.shape(one) for one in (q, k, v)]
    if len(shapes[0]) < 3 or any(shape[:-2] != shapes[0][:-2] for shape in shapes):
        raise Unplanned("its batches differ")
    if move.get(4, "dropout_p", 0.0) or move.get(7, "enable_gqa", False):
        raise Unplanned("its dropout or grouping has no native kernel")
    scale, causal = move.get(6, "scale"), bool(move.get(5, "is_causal", False))
    lines, mask = _mask(move)
    if mask is not None and (causal or not 2 <= len(move.planner.shape(mask)) <= len(shapes[0])):
        raise Unplanned("its mask has no native kernel")
    if scale is not None and not scale > 0:
        raise Unplanned("its scale is not positive")
    mask = BEFORE if lines else mask
    return [*lines, ("attention", {"q": q, "k": k, "v": v, "scale": scale, "causal": causal, "mask": mask})]


def _mask(move: Move) -> tuple[Made, Register | None]:
    """What makes reals of the mask, and the mask as it is given; it may be of booleans, true where a key is seen."""
    given = move.args[3] if len(move.args) > 3 else move.kwargs.get("attn_mask")
    if given is None:
        return [], None
    if not isinstance(given, Ref) or move.planner.dtype(Register(given.index)) != torch.bool:
        return [], _operand(move, 3, "attn_mask")
    # A boolean's byte as an integer: 0 or FARTHEST, and twice that is -inf, which no scale gives where 0 is to stay 0.
    reals = ("dequantize", {"q": Register(given.index), "scale": -FARTHEST, "zero_point": 1})
    return [reals, ("add_f32", {"a": BEFORE, "b": BEFORE})], Register(given.index)


FARTHEST = torch.finfo(torch.float32).min


REALS: dict[str, Callable[[Move], Made]] = {
    "add": _add,
    **dict.fromkeys(("scaled_dot_product_attention", "attend"), _attention),
}
"""Float calls by what the user called, besides modules and moves."""

INEXACT = ("attention", "layer_norm")
"""Lines whose last bits are not torch's."""
