"""Attention between its projections, which stays float32; the kernel adds in another order than torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quant.kernels.reference_plan import Line, Register
from quant.ops.planning import BEFORE, Lines, PlanCall, Unplanned
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
    if len(shapes[0]) < 3 or any(shape[:-2] != shapes[0][:-2] for shape in shapes):
        raise Unplanned("its batches differ")
    if call.setting(4, "dropout_p", 0.0) or call.setting(7, "enable_gqa", False):
        raise Unplanned("its dropout or grouping has no native kernel")
    scale, causal = call.setting(6, "scale"), bool(call.setting(5, "is_causal", False))
    lines, mask = _mask(call)
    if mask is not None and (causal or not 2 <= len(call.values.shape(mask)) <= len(shapes[0])):
        raise Unplanned("its mask has no native kernel")
    if scale is not None and not scale > 0:
        raise Unplanned("its scale is not positive")
    mask = BEFORE if lines else mask
    return [*lines, ("attention", {"q": q, "k": k, "v": v, "scale": scale, "causal": causal, "mask": mask})]


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
