"""Excludes functions from torch.compile's tracing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def not_compiled(function: Callable[..., T]) -> Callable[..., T]:
    """As torch.compiler.disable, which imports the whole compiler where it decorates: that takes as long as torch."""

    disabled: list[Callable[..., T]] = []  # wrapped once, which takes as long as observing a small layer: 50 us

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        if "torch._dynamo" not in sys.modules:  # so nobody compiles
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call
