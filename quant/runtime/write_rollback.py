"""What a program wrote before it found out that it does not stand for a call: taken back, for another one runs then."""

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
    """What `run` gives; where it raises CaptureMismatch, nothing is written.

    Args:
        written: buffers and inputs (`ExpectedCall.written`).
        values: the inputs, by the values that stand for them.
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
