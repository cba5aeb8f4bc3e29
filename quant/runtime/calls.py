"""Functions of this package that graphs and programs call beside torch's.

Capture records two things as these: the assignment of items, and what torch's attention computes between its
projections.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def with_items(x: Tensor, key: Any, value: Any) -> Tensor:
    """A copy of x in which x[key] is value."""
    y = x.clone()
    y[key] = value
    return y


def write_items(x: Tensor, key: Any, value: Any) -> Tensor:
    """x itself, with x[key] = value."""
    x[key] = value
    return x


def _one_call(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let capture record a call of `function` as one call, as it does for torch's functions."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Tensor:
        if has_torch_function(args):
            result: Tensor = handle_torch_function(called, args, *args, **kwargs)
            return result
        return function(*args, **kwargs)

    return called


@_one_call
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool, dropout: float, training: bool
) -> Tensor:
    """softmax(q k' / sqrt(width) + mask) v, (batch, heads, length, width); weights are dropped in training mode."""
    return F.scaled_dot_product_attention(q, k, v, mask, dropout if training else 0.0, is_causal)


@_one_call
def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, *, average: bool) -> Tensor:
    """softmax(q k' / sqrt(width) + mask), (batch, heads, length, keys), or its mean over the heads."""
    scores = torch.matmul(q * (1.0 / math.sqrt(q.shape[-1])), k.transpose(-2, -1))
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    return weights.mean(1) if average else weights
