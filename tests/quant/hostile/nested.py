"""Each case once more as a child of a model, with a layer behind it where it gives out a tensor."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from .cases import WIDTH, Case

INSIDE = "inside another model"
"""What the titles of such cases end with."""


class Outer(nn.Module):
    """Calls a case's module, and a layer on what it gives out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.behind = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        if type(output) is Tensor and output.dtype == torch.float32 and output.shape[-1:] == (WIDTH,):
            return self.behind(output)
        return output


def nested(case: Case) -> Case:
    """The case whose module is a child of another."""
    state = case.state
    return dataclasses.replace(
        case,
        title=f"{case.title} ({INSIDE})",
        module=lambda: Outer(case.module()),
        state=None if state is None else lambda model: state(model.inner),
    )
