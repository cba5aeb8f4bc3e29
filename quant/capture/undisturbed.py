"""Compares a recording with an ordinary run, to find modules that behave differently when they are recorded.

Recorded sizes are subclasses of int, which `type(n) is int` shows; other code looks at torch's modes or at the stack.
So the module is run once more as its user runs it. Where the output differs, the innermost module with another output
for the same arguments has to become an island.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from quant.capture.called import Called
from quant.capture.near import near
from quant.capture.outer_objects import Outside
from quant.capture.proof import run
from quant.capture.random_draws import set_torch_state
from quant.capture.recorded_modules import Watched
from quant.capture.recorder import Recorder
from quant.graph import Span
from quant.runtime.arguments import Arguments, bind, copied, copied_together
from quant.runtime.trees import Ref, map_leaves


class Listener:
    """Gets calls as a recorder does, and keeps the arguments and outputs of each, by path, in order."""

    def __init__(self, root: nn.Module) -> None:
        self.names = {id(module): name for name, module in root.named_modules()}
        self.calls: dict[str, list[tuple[Any, Any]]] = {}
        self.outside = Outside()
        self._thread = threading.get_ident()

    def on_copy(self, module: nn.Module) -> None:
        """Nothing to do: the recorder has noted it."""

    def on_call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread or id(module) not in self.names:
            return forward(*args, **kwargs)
        arguments = copied(bind(module, args, kwargs))
        output = forward(*args, **kwargs)
        self.calls.setdefault(self.names[id(module)], []).append((arguments, copied(output)))
        return output


def disturbed(watched: Watched, recorder: Recorder, call: Arguments) -> str | None:
    """The module within the recorded one that behaves differently when it is recorded; None where none does."""
    watched.put_back(recorder.before)
    root, (args, kwargs) = recorder.root, copied(call)
    try:
        output = root.__dict__["forward"](*args, **kwargs)
        if near(recorder.result, output):
            return None
        watched.put_back(recorder.before)
        listener, (args, kwargs) = Listener(root), copied(call)
        with watched.telling(listener):
            root.__dict__["forward"](*args, **kwargs)
        watched.put_back(recorder.before)
        recorder = recorder.again(recorder.before, training=recorder.training, keeps=True)
        run(watched, recorder, call)
    except Exception:  # the user's own error, which the recording did not reach
        return ""
    counts: dict[str, int] = {}
    for span in recorder.spans:
        place = counts[span.path] = counts.get(span.path, -1) + 1
        calls = listener.calls.get(span.path, [])
        if place < len(calls) and _gave_otherwise(recorder, span, *calls[place]):
            return span.path
    return ""


def depends_on_caller(watched: Watched, call: Called) -> bool:
    """Whether a module called by itself has another output than when its island called it."""
    if call.output is None:
        return False
    before = watched.snapshot()
    try:
        set_torch_state(call.chance)
        args, kwargs = copied_together(call.example)
        with call.autocast.again():
            return not near(call.output, call.module.forward(*args, **kwargs))  # as it was noted: within hooks
    except Exception:  # state that its caller would have set is missing
        return True
    finally:
        before.put_back()


def _gave_otherwise(recorder: Recorder, span: Span, arguments: Any, output: Any) -> bool:
    def real(tree: Any) -> Any:
        return map_leaves(lambda leaf: recorder.value(leaf.index) if isinstance(leaf, Ref) else leaf, tree)

    return near(real(span.arguments), arguments) and not near(real(span.output), output)
