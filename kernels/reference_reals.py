"""The oracle for what a plan computes in float32 between int8 layers: torch's own functions.

A native kernel adds in another order than torch does, so it agrees within rounding and not to the bit; on one machine
every route through the kernels gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def add_f32(a: Tensor, b: Tensor) -> Tensor:
    """a + b, broadcast."""
    return a + b


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, size: int | None = None) -> Tensor:
    """Over the last dimension, which weight and bias have (Ba et al. 2016, arXiv 1607.06450, equations 3 and 4).

    Args:
        size: of that dimension, where it is checked.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Over the pixels of each channel (Ulyanov et al. 2016, arXiv 1607.08022, equation 4).

    Args:
        x: (N, C, ...), with more than one pixel.
        weight, bias: (C,).
    """
    return group_norm(x, x.shape[1], weight, bias, eps)  # torch's instance norm takes no empty batch


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, size: int) -> Tensor:
    """x / sqrt(mean of x**2 + eps) * weight, over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467, 4).

    Args:
        size: of that dimension, which is checked.
    """
    return F.rms_norm(x, (size,), weight, eps)


def group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Over the channels of a group and all pixels (Wu and He 2018, arXiv 1803.08494, equations 1 to 3).

    Args:
        x: (N, C, ...).
        groups: a divisor of C.
        weight, bias: (C,).

    In double: torch takes the square of the mean from the mean of squares, which of two values 1.912 and 1.901 leaves
    half a percent of error.
    """
    gain, shift = (None if one is None else one.double() for one in (weight, bias))
    return F.group_norm(x.double(), groups, gain, shift, eps).to(torch.float32)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, mask: Tensor | None = None) -> Tensor:
    """softmax(q k' * scale + mask) v (Vaswani et al. 2017, arXiv 1706.03762, equation 1).

    Args:
        q, k, v: (..., L, E), (..., S, E), (..., S, V), three dimensions or more.
        scale: positive; None is 1 / sqrt(E).
        causal: query i sees keys 0 to i.
        mask: float32, broadcast to (..., L, S), or None; not with causal. A query that it forbids all keys gives zeros.

    Returns:
        (..., L, V).
    """
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)


ARITHMETIC: dict[str, Callable[[Tensor, Tensor | float], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}
"""By the words that a plan's text has for it."""


def number_f32(x: Tensor, by: str, number: float) -> Tensor:
    """x and one number."""
    if by == "sub_from":
        return number - x
    return ARITHMETIC[by](x, number)


def binary_f32(a: Tensor, b: Tensor, by: str) -> Tensor:
    """a - b, a * b or a / b, broadcast."""
    return ARITHMETIC[by](a, b)


def gelu(x: Tensor) -> Tensor:
    """x * (1 + erf(x / sqrt 2)) / 2 (Hendrycks and Gimpel 2016, arXiv 1606.08415); torch's own is NaN at infinity."""
    return x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "cos": torch.cos,
    "sin": torch.sin,
    "gelu": gelu,
}
"""By the words that a plan's text has for them, in the order of the kernels (csrc/core/rows/reals.h)."""


def unary_f32(x: Tensor, by: str) -> Tensor:
    """A function of each value."""
    return FUNCTIONS[by](x)


def reduce_f32(x: Tensor, by: str, dim: tuple[int, ...], keepdim: bool) -> Tensor:
    """The sum or the mean over dimensions."""
    return (torch.mean if by == "mean" else torch.sum)(x, dim, keepdim)


def where_f32(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a where the byte of the mask is not 0, else b; broadcast."""
    return torch.where(mask != 0, a, b)


def silu(x: Tensor) -> Tensor:
    """x / (1 + e**-x) (Elfwing et al. 2017, arXiv 1702.03118, equation 1)."""
    return F.silu(x)


def softmax(x: Tensor, logarithm: bool) -> Tensor:
    """Over the last dimension; NaN where all of a row is -inf."""
    return F.log_softmax(x, -1) if logarithm else F.softmax(x, -1)


REALS: dict[str, Callable[..., Tensor]] = {
    "add_f32": add_f32,
    "layer_norm": layer_norm,
    "instance_norm": instance_norm,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
    "attention": attention,
    "constant": lambda value: value,
    "number_f32": number_f32,
    "binary_f32": binary_f32,
    "cat_f32": lambda tensors, dim: torch.cat(list(tensors), dim),
    "softmax": softmax,
    "unary_f32": unary_f32,
    "reduce_f32": reduce_f32,
    "where_f32": where_f32,
    "silu": silu,
}
"""By the names that a plan's text has for them."""
