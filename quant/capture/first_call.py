"""Hooks that a model registers on its own modules in its first call, as transformers does to collect hidden states.

A forward that changes its modules makes an island of whoever reads them. But where a call does nothing else that lasts,
every later call finds these hooks there, and is the one to record.
"""

from __future__ import annotations

import contextlib

from torch import nn

from quant.capture.recorded_modules import HOOKS, HOW_CALLED, Watched
from quant.runtime.arguments import Arguments, copied
from quant.runtime.names import attribute, full_name


def let_register_hooks(watched: Watched, module: nn.Module, call: Arguments) -> None:
    """Run a call and keep the hooks that it registered until the end of the capture, with the marks that it did so.

    Nothing is kept where the call changes anything else, or registers no hooks.
    """
    tables = {full_name(path, name) for path, one in watched.model.named_modules() for name in (*HOOKS, *HOW_CALLED)}
    before = watched.snapshot()
    _run(module, call)
    changed = before.put_back()
    if tables & changed:
        _run(module, call)
        if not all(attribute(watched.model, name) is True for name in changed - tables):
            before.put_back()


def _run(module: nn.Module, call: Arguments) -> None:
    """Run a call; an error of the model's own is shown where it is recorded."""
    args, kwargs = copied(call)
    with contextlib.suppress(Exception):
        module.__dict__["forward"](*args, **kwargs)
