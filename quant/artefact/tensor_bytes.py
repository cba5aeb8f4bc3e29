"""The bytes of a tensor as they stand in a file."""

from __future__ import annotations

import torch
from torch import Tensor


def tensor_bytes(tensor: Tensor) -> bytes:
    """In the order of a contiguous tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
