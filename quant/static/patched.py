"""What is patched while a model is traced: `nn.Module.__call__`, the reading of parameters, some functions of torch.

Nothing else is, and all of it is put back, whatever the user's forward raises. Python has one of each for all threads:
other threads' calls go to the original, and a second thread that traces waits for the first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quant.static.traced import PATCHED
from quant.static.traced_calls import traced_leaves

if TYPE_CHECKING:
    from quant.static.tracer import Tracer


_tracing = threading.RLock()
"""Held while something is patched: who patched over another's patch would put that one back for good."""


@contextlib.contextmanager
def patched(tracer: Tracer) -> Iterator[None]:
    """Let the tracer see this thread's calls of modules, reads of parameters, and what `PATCHED` names."""
    with _tracing:
        yield from _patch(tracer, threading.get_ident())


def _patch(tracer: Tracer, thread: int) -> Iterator[None]:
    call, getter = nn.Module.__call__, nn.Module.__getattr__

    def traced_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return call(module, *args, **kwargs)
        return tracer.call(module, call, args, kwargs)

    def traced_getattr(module: nn.Module, name: str) -> Any:
        value = getter(module, name)
        if isinstance(value, Tensor) and threading.get_ident() == thread:
            return tracer.attribute(value)
        return value

    def seen(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            if traced_leaves((args, kwargs)):
                return tracer.record("function", original, args, kwargs)
            return original(*args, **kwargs)

        return make

    nn.Module.__call__ = traced_call  # type: ignore[method-assign]
    nn.Module.__getattr__ = traced_getattr  # type: ignore[method-assign]
    for name, original in PATCHED.items():
        setattr(torch, name, seen(original))
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        nn.Module.__getattr__ = getter  # type: ignore[method-assign]
        for name, original in PATCHED.items():
            setattr(torch, name, original)
