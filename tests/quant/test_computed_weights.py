"""A parameter is not restored from a layer that holds what was computed from it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant


class Turned(nn.Module):
    """A layer whose weight is a turned square parameter, and a branch on a size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.t())
        return y * 2 if x.shape[1] == 5 else y


def test_a_turned_weight_is_not_taken_for_the_parameter() -> None:
    """The product of another weight is as large, so that nothing would tell."""
    torch.manual_seed(0)
    model = Turned().eval()
    q = quant.quantize_static(model, [torch.randn(16, 5, 8)], progress=False)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 't'"):
        q(torch.randn(4, 7, 8))
