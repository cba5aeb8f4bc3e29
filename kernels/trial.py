"""Tests whether the product of a third party's backend is exact, before the backend is used."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from quant.kernels.reference import Product, exact_product
from torch import Tensor

SHAPES = ((1, 1, 1), (3, 5, 7), (2, 4, 64), (5, 3, 1031))
"""Rows, outputs and depth."""


def problem(product: Product) -> str:
    """'' where a product is exact, else what is wrong with it."""
    # In a thread of its own: a mode of this one, as torch.export's fake tensors, would answer in its place.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_try, product).result()


def _try(product: Product) -> str:
    for q_x, q_weight in _operands():
        expected = exact_product(q_x, q_weight)
        what = f"its product of {q_x.shape[0]} x {q_x.shape[1]} by {q_weight.shape[0]}"
        try:
            sums = product(q_x, q_weight)
        except Exception as error:
            return f"{what} fails: {type(error).__name__}: {error}"
        if not isinstance(sums, Tensor) or sums.dtype != torch.int32 or sums.shape != expected.shape:
            came = f"{sums.dtype} {tuple(sums.shape)}" if isinstance(sums, Tensor) else type(sums).__name__
            return f"{what} is {came}, expected torch.int32 {tuple(expected.shape)}"
        wrong = (sums != expected).nonzero().tolist()
        if wrong:
            at = tuple(wrong[0])
            return f"{what} is not exact: {int(sums[at])} where the sum is {int(expected[at])}"
    return ""


def _operands() -> Iterator[tuple[Tensor, Tensor]]:
    """Activations and weights of one sign, whose pairs are beyond 16 bits and whose sums are odd and beyond 2**24."""
    for rows, outputs, depth in SHAPES:
        q_x = torch.full((rows, depth), 255, dtype=torch.uint8)
        q_x[1:, depth // 2 :] = torch.arange(1, rows, dtype=torch.uint8)[:, None]
        q_weight = torch.full((outputs, depth), 127, dtype=torch.int8)
        q_weight[1::2] = -128
        q_weight[2::2, ::3] = 1
        yield q_x, q_weight
