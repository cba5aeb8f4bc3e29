"""Attention between its projections, which stays float32; the kernel adds in another order than torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from quant.kernels.reference_plan import Line, Register
from quant.ops.planning import BEFORE, Lines, PlanCall, Unplanned, before
from quant.ops.registry import plans_reals
from quant.runtime.calls import attend
from quant.runtime.module_calls import AttentionCall
from quant.runtime.trees import Ref


@plans_reals(attend, exact=False)
def attend_in_reals(call: PlanCall) -> Lines | AttentionCall:
    """Of a `MultiheadAttention`, which may have dropout."""
    lines = attention_in_reals(call)
    if not call.kwargs.get("dropout"):
        return lines
    [(op, settings)] = lines
    reads = tuple(value.index for value in settings.values() if isinstance(value, Register))
    return AttentionCall(call.out, reads, call.node.owner, str(Line(call.out, op, settings)))


@plans_reals(F.scaled_dot_product_attention, exact=False)
def attention_in_reals(call: PlanCall) -> Lines:
    """Without dropout; a mask is of float32. Batches must be equal as captured, as only sizes of 1 are repeated."""
    q, k, v = (call.tensor(place, name) for place, name in enumerate(("query", "key", "value")))
    shapes = [call.values.shape(one) for one in (q, k, v)]
    grouped = bool(call.setting(7, "enable_gqa", False)) and len(shapes[0]) == 4 and shapes[0][1] != shapes[1][1]
    batches = [(shape[0], *shape[2:-2]) if grouped else shape[:-2] for shape in shapes]
    if len(shapes[0]) < 3 or any(batch != batches[0] for batch in batches) or shapes[1][:-2] != shapes[2][:-2]:
        raise Unplanned("its batches differ")
    if call.setting(4, "dropout_p", 0.0):
        raise Unplanned("its dropout has no native kernel")
    scale, causal = call.setting(6, "scale"), bool(call.setting(5, "is_causal", False))
    lines, mask = _mask(call)
    if mask is not None and (causal or not 2 <= len(call.values.shape(mask)) <= len(shapes[0])):
        raise Unplanned("its mask has no native kernel")
    if scale is not None and not scale > 0:
        raise Unplanned("its scale is not positive")
    mask = BEFORE if lines else mask
    settings = {"scale": scale, "causal": causal}
    if grouped:
        return [*lines, *_grouped(call, (q, k, v), mask, settings)]
    return [*lines, ("attention", {"q": q, "k": k, "v": v, **settings, "mask": mask})]


def _grouped(
    call: PlanCall, qkv: tuple[Register, Register, Register], mask: Register | None, settings: dict[str, Any]
) -> Lines:
    """Heads of queries in groups that share a head of keys and values, along a dimension after the heads of keys.

    Args:
        mask: as `_mask` gives it, or BEFORE; the same for all heads.
    """
    q, k, v = qkv
    lines: Lines = []
    if mask is not None:
        shape = call.values.shape(_mask_register(call))
        if len(shape) != 4 or shape[1] != 1:
            raise Unplanned("its mask differs between heads of a group")
        lines.append(("unsqueeze", {"x": mask, "dim": 1}))
    groups = (Register(q.index, 0), Register(k.index, 1), -1, Register(q.index, 2), Register(q.index, 3))
    lines += [("reshape", {"x": q, "shape": groups}), *(("unsqueeze", {"x": one, "dim": 2}) for one in (k, v))]
    masked = None if mask is None else before(4)
    lines.append(("attention", {"q": before(3), "k": before(2), "v": before(1), **settings, "mask": masked}))
    heads = (Register(q.index, 0), Register(q.index, 1), Register(q.index, 2), Register(v.index, 3))
    return [*lines, ("reshape", {"x": BEFORE, "shape": heads})]


def _mask_register(call: PlanCall) -> Register:
    mask = call.argument(3, "attn_mask")
    assert isinstance(mask, Ref)
    return Register(mask.index)


def _mask(call: PlanCall) -> tuple[Lines, Register | None]:
    """Lines that turn the mask into float32, and the mask's register; booleans are true where a key is seen."""
    mask = call.argument(3, "attn_mask")
    if mask is None:
        return [], None
    if not isinstance(mask, Ref) or call.values.dtype(Register(mask.index)) != torch.bool:
        return [], call.tensor(3, "attn_mask")
    # A boolean's byte becomes 0 or FARTHEST, and twice FARTHEST is -inf; no scale alone maps 1 to -inf and 0 to 0.
    reals = ("dequantize", {"q": Register(mask.index), "scale": -FARTHEST, "zero_point": 1})
    return [reals, ("add_f32", {"a": BEFORE, "b": BEFORE})], Register(mask.index)


FARTHEST = torch.finfo(torch.float32).min
