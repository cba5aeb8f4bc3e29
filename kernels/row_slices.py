"""A float weight some rows at a time, so that a large one of a half type never stands in float32 as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

VALUES = 1 << 18
"""About the values of one slice: 1 MiB of float32.

malloc keeps freed temporaries between the tensors that stay: with slices of 4 MiB up to 150 MiB beside an int4 model of
626, with these up to 25.
"""

TOGETHER = 64
"""Rows of a slice come in multiples of this; narrow weights are packed so many outputs at a time."""


def row_slices(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The rows of (N, K), some at a time: the index of each slice's first row, and the rows as float32.

    There is always one slice, which is empty where N is 0.
    """
    rows = weight.detach()
    step = max(VALUES // max(rows.shape[1], 1) // TOGETHER, 1) * TOGETHER
    for first in range(0, max(rows.shape[0], 1), step):
        yield first, rows[first : first + step].to(torch.float32)


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor of any shape holds neither NaN nor inf."""
    return all(bool(torch.isfinite(part).all()) for part in tensor.detach().reshape(-1).split(VALUES))
