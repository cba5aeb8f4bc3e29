"""Checks the inputs of a training step for NaN and infinities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quant.runtime.binding import bound_values
from quant.static.runner import GraphRunner


def finite_inputs(runner: GraphRunner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Any]:
    """The inputs of a call by node; in training mode they must be finite.

    Raises:
        ValueError: NaN or inf in an input, which would be rounded to something finite and trained on.
    """
    values = bound_values(runner.expected, runner.root, args, kwargs)
    if runner.training and not torch.compiler.is_compiling():
        for index, value in values.items():
            if not isinstance(value, Tensor):
                continue
            if value.is_floating_point() and value.device.type == "cpu" and not bool(torch.isfinite(value.sum())):
                _refuse(runner, index, value)
    return values


def _refuse(runner: GraphRunner, index: int, value: Tensor) -> None:
    nan, inf = int(torch.isnan(value).sum()), int(torch.isinf(value).sum())
    if nan or inf:  # a sum of finite values may overflow
        raise ValueError(
            f"layer '{runner.graph.path or '(root)'}': {nan} NaN and {inf} infinite values in its input "
            f"'{runner.graph.nodes[index].target}', which rounding would turn into finite ones and train on; look at "
            "the batch"
        )
