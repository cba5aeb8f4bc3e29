"""Example inputs as JSON: the shapes and dtypes that capture needs, without the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quant.runtime.names import dtype_name

MOST_VALUES = 1 << 28
"""Of one tensor of an example: beyond it the inputs have to be given."""


class CannotRebuild(ValueError):
    """A description that does not fit the model, or cannot be rebuilt without example inputs."""


def encode(tree: Any) -> Any:
    """Example inputs as JSON, tensors by their shape and dtype; None where a value has no such form."""
    try:
        return _encode(tree)
    except TypeError:
        return None


def _encode(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return {"tensor": list(tree.shape), "dtype": dtype_name(tree.dtype)}
    if type(tree) in (tuple, list):
        return {type(tree).__name__: [_encode(item) for item in tree]}
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return {"dict": {key: _encode(value) for key, value in tree.items()}}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"value": tree}
    raise TypeError(f"no JSON form for {type(tree).__name__}")


def decode(tree: Any, fill: int = 1) -> Any:
    """Example inputs from JSON; float tensors are filled with ones, integer and boolean ones with `fill`."""
    if not isinstance(tree, dict):
        raise CannotRebuild("the description holds no example inputs; give example_inputs")
    decoders: dict[str, Callable[[Any], Any]] = {
        "tuple": lambda items: tuple(decode(item, fill) for item in items),
        "list": lambda items: [decode(item, fill) for item in items],
        "dict": lambda items: {key: decode(value, fill) for key, value in items.items()},
        "value": lambda value: value,
    }
    for key, make in decoders.items():
        if key in tree:
            return make(tree[key])
    dtype = getattr(torch, str(tree.get("dtype")), None)
    if not isinstance(dtype, torch.dtype):
        raise CannotRebuild(f"example inputs: {tree} is no tensor's shape and dtype")
    return torch.full(_sizes(tree.get("tensor")), 1 if dtype.is_floating_point else fill, dtype=dtype)


def _sizes(sizes: Any) -> list[int]:
    """The sizes of a tensor, checked before there is memory for it."""
    if not isinstance(sizes, list) or not all(type(one) is int and one >= 0 for one in sizes):
        raise CannotRebuild(f"example inputs: {sizes!r:.80} are no sizes of a tensor")
    if math.prod(max(one, 1) for one in sizes) > MOST_VALUES:
        raise CannotRebuild(
            f"example inputs: a tensor of sizes {sizes!r:.80} has more than {MOST_VALUES} values; give example_inputs"
        )
    return sizes
