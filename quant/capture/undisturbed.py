"""A recording held against a run that nobody records: whoever notices the recording is no part of a graph.

Sizes are subclasses of int while they are recorded, and `type(n) is int` tells; so does code that looks at the modes of
torch or at the stack. The module is run once more as its user runs it. Where that gives something else, the innermost
module that gave something else for the same arguments has to run as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quant.capture.called import Called
from quant.capture.outer_objects import Outside
from quant.capture.proof import run
from quant.capture.random_draws import set_torch_state
from quant.capture.recorded_modules import Watched
from quant.capture.recorder import Recorder
from quant.graph import Span
from quant.runtime.arguments import Arguments, bind, copied, copied_together
from quant.runtime.objects import opened
from quant.runtime.trees import Ref, leaves, map_leaves

NEAR = 1e-3
"""Largest relative error of a tensor: torch's attention is recorded as plain calls, which round otherwise."""


class Listener:
    """Is told of calls as a recorder is, and keeps the arguments and outputs of each, by path, in order."""

    def __init__(self, root: nn.Module) -> None:
        self.names = {id(module): name for name, module in root.named_modules()}
        self.calls: dict[str, list[tuple[Any, Any]]] = {}
        self.outside = Outside()
        self._thread = threading.get_ident()

    def on_copy(self, module: nn.Module) -> None:
        """As of a recorder, which has seen to it."""

    def on_call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread or id(module) not in self.names:
            return forward(*args, **kwargs)
        arguments = copied(bind(module, args, kwargs))
        output = forward(*args, **kwargs)
        self.calls.setdefault(self.names[id(module)], []).append((arguments, copied(output)))
        return output


def disturbed(watched: Watched, recorder: Recorder, call: Arguments) -> str | None:
    """The module (within the recorded one) that does something else when it is recorded; None where none does."""
    watched.put_back(recorder.before)
    root, (args, kwargs) = recorder.root, copied(call)
    try:
        output = root.__dict__["forward"](*args, **kwargs)
        if _near(recorder.result, output):
            return None
        watched.put_back(recorder.before)
        listener, (args, kwargs) = Listener(root), copied(call)
        with watched.telling(listener):
            root.__dict__["forward"](*args, **kwargs)
        watched.put_back(recorder.before)
        recorder = recorder.again(recorder.before, training=recorder.training, keeps=True)
        run(watched, recorder, call)
    except Exception:  # the user's own, which the recording did not come to
        return ""
    counts: dict[str, int] = {}
    for span in recorder.spans:
        place = counts[span.path] = counts.get(span.path, -1) + 1
        calls = listener.calls.get(span.path, [])
        if place < len(calls) and _gave_otherwise(recorder, span, *calls[place]):
            return span.path
    return ""


def depends_on_caller(watched: Watched, call: Called) -> bool:
    """Whether a module gives something else by itself than it gave where an island called it."""
    if call.output is None:
        return False
    before = watched.snapshot()
    try:
        set_torch_state(call.chance)
        args, kwargs = copied_together(call.example)
        return not _near(call.output, call.module.forward(*args, **kwargs))  # as it was noted: within hooks
    except Exception:  # what its caller would have set is not there
        return True
    finally:
        before.put_back()


def _gave_otherwise(recorder: Recorder, span: Span, arguments: Any, output: Any) -> bool:
    def real(tree: Any) -> Any:
        return map_leaves(lambda leaf: recorder.value(leaf.index) if isinstance(leaf, Ref) else leaf, tree)

    return _near(real(span.arguments), arguments) and not _near(real(span.output), output)


def _near(one: Any, other: Any) -> bool:
    """Whether two outputs have as many tensors, and those the same shapes and nearly the same values."""
    first, second = _tensors(one), _tensors(other)
    return len(first) == len(second) and all(map(_near_tensors, first, second))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(opened(tree, lambda leaf: isinstance(leaf, Tensor))) if isinstance(leaf, Tensor)]


def _near_tensors(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout != torch.strided or one.is_nested or not one.is_floating_point():
        return True  # whole numbers may come out of near ties
    a, b = one.detach().double(), other.detach().double()
    finite = a.isfinite() & b.isfinite()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    a, b = a[finite], b[finite]
    return bool((a - b).norm() <= NEAR * b.norm())
