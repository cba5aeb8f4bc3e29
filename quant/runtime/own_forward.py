"""Runs the user's own forward of a module around int8 layers, for calls that no program stands for."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from quant.kernels.at_fork import forked_lock
from quant.runtime.matching import CaptureMismatch
from quant.runtime.programs import HIDDEN, RESERVED, Programs

_lock = forked_lock()
_falling_back: contextvars.ContextVar[bool] = contextvars.ContextVar("octet_falling_back", default=False)


def is_falling_back() -> bool:
    """Whether this call comes from a user's forward that runs around int8 layers."""
    return not torch.compiler.is_compiling() and _falling_back.get()


@contextlib.contextmanager
def falling_back() -> Iterator[None]:
    """Let modules called in this context run their own forward where no program stands for the call."""
    token = _falling_back.set(True)
    try:
        yield
    finally:
        _falling_back.reset(token)


@contextlib.contextmanager
def without_runner(runner: Programs) -> Iterator[None]:
    """Let a captured module have the user's children alone: its forward may go through them, as a Sequential's does.

    Several threads may run it; the runner is a child again when the last has ended. No program looks for it there. Each
    change is a new dictionary of children: another thread may be going through the one before.
    """
    if torch.compiler.is_compiling():
        yield
        return
    held = runner.root.__dict__
    with _lock:
        runner.hidden += 1
        held[HIDDEN] = runner
        held["_modules"] = children = dict(held["_modules"])
        children.pop(RESERVED, None)
    try:
        yield
    finally:
        with _lock:
            runner.hidden -= 1
            if not runner.hidden:
                held["_modules"] = {**held["_modules"], RESERVED: runner}
                held.pop(HIDDEN, None)


def run_own_forward(
    root: nn.Module,
    own: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mismatch: CaptureMismatch,
    lost: Sequence[str] = (),
) -> Any:
    """Run the forward of the user's module: its class's, or `own`, one that was set on the module.

    An error that it raises has the mismatch as its cause, since the call itself may be a mistake.

    Args:
        lost: the names of parameters that it may read and that are not there any more.

    Raises:
        CaptureMismatch: it fails, and some are lost.
    """
    with falling_back():
        try:
            return type(root).forward(root, *args, **kwargs) if own is None else own(*args, **kwargs)
        except CaptureMismatch:
            raise
        except Exception as error:
            if lost:
                raise CaptureMismatch(
                    f"{mismatch}; the model's own forward, which runs for such a call, fails ({type(error).__name__}: "
                    f"{error}): of {', '.join(lost)} the int8 layer has only what the forward computes of it; let "
                    "calibration see such a call, as a batch or among the examples of quant.prepare"
                ) from error
            raise error from mismatch


@contextlib.contextmanager
def computing(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward; its own hooks still run."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before
