"""Undoes the writes of a program that turns out not to stand for a call, before another one runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quant.runtime.matching import CaptureMismatch
from quant.runtime.names import attribute
from quant.runtime.trees import Attr, Ref


def undone_at_mismatch(
    written: Sequence[Attr | Ref], root: nn.Module, values: Mapping[int, Any], run: Callable[[], Any]
) -> Any:
    """Call `run`; where it raises CaptureMismatch, its writes are undone.

    Args:
        written: the buffers and inputs that it may write to (`ExpectedCall.written`).
        root: the module with the buffers.
        values: value id -> input.
        run: runs the program.
    """
    tensors = [attribute(root, one.path) if isinstance(one, Attr) else values[one.index] for one in written]
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors if isinstance(tensor, Tensor)]
    try:
        return run()
    except CaptureMismatch:
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)
        raise
