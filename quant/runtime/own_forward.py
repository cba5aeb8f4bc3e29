"""The user's own forward of a module, run as it is around int8 layers."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quant.runtime.matching import CaptureMismatch

_falling_back: contextvars.ContextVar[bool] = contextvars.ContextVar("octet_falling_back", default=False)


def is_falling_back() -> bool:
    """Whether this call comes from a user's forward that runs as it is, around int8 layers."""
    return not torch.compiler.is_compiling() and _falling_back.get()


@contextlib.contextmanager
def falling_back() -> Iterator[None]:
    """Let parts of the model that the user's forward calls run as they are where they have no program of their own."""
    token = _falling_back.set(True)
    try:
        yield
    finally:
        _falling_back.reset(token)


def run_own_forward(
    root: nn.Module, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mismatch: CaptureMismatch
) -> Any:
    """The forward that the user's module has: its class's, or one that was set on it.

    What it raises has the mismatch as its cause: a call that no program stands for may be one that nobody meant.
    """
    with falling_back():
        try:
            return type(root).forward(root, *args, **kwargs) if own is None else own(*args, **kwargs)
        except CaptureMismatch:
            raise
        except Exception as error:
            raise error from mismatch
