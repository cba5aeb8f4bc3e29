"""Gives a runner's `run` the signature of the user's forward, which libraries inspect.

Hugging Face's Trainer, for example, drops the columns of a data set that are not arguments of the model's forward.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn


def as_forward(run: Callable[..., Any], module: nn.Module, own: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A bound method that calls `run` and has the signature of the user's forward.

    Args:
        run: a bound method of a runner.
        module: the module whose forward it becomes.
        own: the forward that the user had set on the module itself, if any.
    """
    assert isinstance(run, types.MethodType)
    plain = run.__func__
    try:
        signature = inspect.signature(type(module).forward if own is None else own)
    except (TypeError, ValueError):  # a callable without a signature
        return run
    if own is not None:  # which has no self
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = signature.replace(parameters=[first, *signature.parameters.values()])
    shown = types.FunctionType(plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    shown.__doc__, shown.__qualname__, shown.__module__ = plain.__doc__, plain.__qualname__, plain.__module__
    shown.__kwdefaults__ = plain.__kwdefaults__
    shown.__signature__ = signature  # type: ignore[attr-defined]
    return types.MethodType(shown, run.__self__)
