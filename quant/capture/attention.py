"""Forwards that capture records in place of those of torch's attention layers, which a graph cannot represent.

`nn.MultiheadAttention` passes everything to one function, which chooses a kernel by flags. `multihead` computes the
same by plain calls on the parameters, so that its projections are ordinary linear layers; `attend` and
`attention_weights` (`quant/runtime/calls.py`) stay one call each. Torch's encoders and decoders read the values of
their masks, only to see whether they are causal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.leaves import base_layer, is_attention
from quant.runtime.calls import attend, attention_weights

HINTS: dict[type[nn.Module] | None, str] = {nn.TransformerEncoder: "is_causal", nn.TransformerDecoder: "tgt_is_causal"}
"""Arguments that say whether a mask is causal. They change no result, but None makes torch read the mask's values."""


def forward_of(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward that capture records for `module`, whose own forward is `forward`."""
    if isinstance(module, nn.MultiheadAttention) and is_attention(module):
        return partial(multihead, module)
    return partial(_unlooking, module, forward) if base_layer(module) in HINTS else forward


def stop_nesting(module: nn.Module) -> None:
    """Keep torch's encoders from using nested tensors, a choice for which they read the mask's values."""
    if base_layer(module) in HINTS:
        module.__dict__["use_nested_tensor"] = False


def _unlooking(module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An encoder's or decoder's forward, without reading the values of masks."""
    bound = inspect.signature(forward).bind(*args, **kwargs)
    bound.apply_defaults()
    hint = HINTS[base_layer(module)]
    bound.arguments[hint] = bool(bound.arguments[hint])
    return forward(*bound.args, **bound.kwargs)


def multihead(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward of torch.nn.MultiheadAttention by plain calls, for modules that `is_attention` accepts."""
    if is_causal and attn_mask is None:
        raise ValueError("is_causal is a hint about attn_mask, which must be given too")
    # Not dim(), which each run would check beside the plan: a call of other ranks fails in permute or unflatten.
    batched = len(query.shape) == 3
    length_first = not (batched and module.batch_first)
    projected = _projected(module, query, key, value)
    q, k, v = (_heads(one if batched else one.unsqueeze(1), length_first) for one in projected)
    # As torch does: where the kernel has a causal form, a mask declared causal is not read.
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _mask(module, attn_mask, key_padding_mask, batched, q.dtype)
    y = attend(q, k, v, mask, is_causal=causal, dropout=module.dropout, training=module.training)
    y = y.permute(*((2, 0, 1, 3) if length_first else (0, 2, 1, 3))).flatten(2)
    y = F.linear(y, module.out_proj.weight, module.out_proj.bias)
    weights = attention_weights(q, k, mask, average=average_attn_weights) if need_weights else None
    if batched:
        return y, weights
    return y.squeeze(1), None if weights is None else weights.squeeze(0)


def _projected(module: nn.MultiheadAttention, *inputs: Tensor) -> list[Tensor]:
    """Query, key and value, (..., heads, head_dim) each. Neighbouring inputs that are one tensor are one product."""
    size, shape = module.embed_dim, (module.num_heads, module.head_dim)
    bias: Any = module.in_proj_bias
    if not module._qkv_same_embed_dim:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = [None if bias is None else bias[i * size : (i + 1) * size] for i in range(3)]
        return [F.linear(*one).unflatten(-1, shape) for one in zip(inputs, weights, biases, strict=True)]
    projected: list[Tensor] = []
    while (first := len(projected)) < 3:
        same = next((i for i in range(first, 3) if inputs[i] is not inputs[first]), 3) - first
        rows = slice(first * size, (first + same) * size)
        weight, part = module.in_proj_weight[rows], None if bias is None else bias[rows]
        y = F.linear(inputs[first], weight, part).unflatten(-1, (same, *shape))
        before: tuple[Any, ...] = (slice(None),) * (len(y.shape) - 3)
        projected += [y[before + (i,)] for i in range(same)]  # noqa: RUF005 - y[*before, i] is no Python 3.10
    return projected


def _heads(x: Tensor, length_first: bool) -> Tensor:
    """(length, batch, heads, width) or (batch, length, heads, width) -> (batch, heads, length, width)."""
    return x.permute(*((1, 2, 0, 3) if length_first else (0, 2, 1, 3)))


def _mask(
    module: nn.MultiheadAttention, attn_mask: Tensor | None, padding: Tensor | None, batched: bool, dtype: torch.dtype
) -> Tensor | None:
    """The mask to add to the scores, broadcastable to (batch, heads, length, keys)."""
    if padding is not None:
        padding = _additive(padding if batched else padding.unsqueeze(0), dtype).unflatten(1, (1, 1, -1))
    if attn_mask is None:
        return padding
    mask = _additive(attn_mask, dtype)
    if len(mask.shape) == 3:
        mask = mask.unflatten(0, (-1, module.num_heads))
    return mask if padding is None else mask + padding


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add: -inf where a boolean mask is true."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
    return mask if mask.dtype == dtype else mask.to(dtype)
