"""Whether two calls of a module gave nearly the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quant.runtime.objects import opened
from quant.runtime.trees import leaves

NEAR = 1e-3
"""Largest relative error of a tensor: torch's attention is recorded as plain calls, which round differently."""


def near(one: Any, other: Any) -> bool:
    """Whether two outputs have the same number of tensors, of the same shapes and nearly the same values."""
    first, second = _tensors(one), _tensors(other)
    return len(first) == len(second) and all(map(_near_tensors, first, second))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(opened(tree, lambda leaf: isinstance(leaf, Tensor))) if isinstance(leaf, Tensor)]


def _near_tensors(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout != torch.strided or one.is_nested or not one.is_floating_point():
        return True  # integers may differ by near ties
    a, b = one.detach().double(), other.detach().double()
    finite = a.isfinite() & b.isfinite()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    a, b = a[finite], b[finite]
    return bool((a - b).norm() <= NEAR * b.norm())
