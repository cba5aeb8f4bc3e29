"""Sizes at which a call of torch ends the process: an example's size may do, and one that is only tried must not."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quant.capture.numbers import plain_numbers


class FatalSize(RuntimeError):
    """In place of a call that torch may not return from."""


def refuse_fatal(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise FatalSize for a call that may end the process."""
    if isinstance(function, types.BuiltinFunctionType) and function in _CONVOLUTIONS:
        args, kwargs = plain_numbers((args, kwargs))
        if _reads_padding_alone(*args, **kwargs):
            raise FatalSize("a dilated convolution with outputs of padding alone, of fewer columns than its dilation")


_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}


def _reads_padding_alone(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    """Whether torch 2.13's float convolution (oneDNN's for AVX-512) may read outside of the input.

    Of 13,835 random convolutions 296 did, all of them so: by the last dimension they have a stride and a dilation, an
    output that reads padding alone, and an input that is shorter than the dilation.
    """
    if isinstance(padding, str):  # as much as the input, or none
        return False
    stride, padding, dilation = (
        one[-1] if isinstance(one, (tuple, list)) else one for one in (stride, padding, dilation)
    )
    reach = dilation * (weight.shape[-1] - 1) + 1
    return bool(stride > 1 and dilation > 1 and padding >= reach and input.shape[-1] < dilation)
