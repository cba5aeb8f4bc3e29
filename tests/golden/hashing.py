"""A hash of tensors: of every byte, and of names, dtypes and shapes. Nothing of `quant` is imported."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def digest(values: dict[str, Tensor]) -> str:
    hashed = hashlib.sha256()
    for place, value in values.items():
        hashed.update(f"{place} {value.dtype} {tuple(value.shape)}".encode())
        hashed.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:32]


def tensors(value: Any) -> Iterator[Tensor]:
    """In the order in which they stand in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors(one)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
