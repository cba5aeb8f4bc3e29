"""Notes the modules that islands call, and their arguments, so that each can be captured by itself afterwards.

An island may call its layers in threads of its own. The model is a private copy, so a call in any thread belongs to the
recorded forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from quant.capture.autocast import Autocast
from quant.capture.places import States
from quant.capture.places import alike as found_alike
from quant.capture.random_draws import torch_state
from quant.capture.snapshot import Snapshot
from quant.capture.unrecordable import foreign, is_transformed, read_once
from quant.leaves import is_leaf
from quant.runtime.arguments import Arguments, alike, copied, copied_together, share_memory, tensors_in


class AloneReason(str, Enum):
    """Why a module that an island calls has no graph of its own, as its calls show; reports and files have the text."""

    OTHER_PARAMETERS = "it is called with parameters that are not its own"
    VARIES = "it is called with different arguments each time"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def read(cls, text: str) -> str:
        """The member with a text, as a file has it; other texts as they are."""
        return next((one for one in cls if one.value == text), text)


@dataclass
class Called:
    """A module that an island called.

    Attributes:
        example: a copy of the arguments of its first call, or of the first in which some share memory.
        reason: the reason that it cannot have a graph of its own; '' where it can.
        output, chance: its output in that call, and torch's random state before it; None for the island itself.
        reached: the objects outside of the model that it used in its first call.
        children: dotted names of the modules that it called.
        autocast: torch's, in that call.
    """

    module: nn.Module
    example: Arguments
    reason: str = ""
    output: Any = None
    chance: Any = None
    reached: States = field(default_factory=dict)
    children: list[str] = field(default_factory=list)
    autocast: Autocast = field(default_factory=Autocast.now)


class IslandCalls:
    """The calls of modules while an island runs, in any thread.

    Attributes:
        calls: dotted name -> module that was called.
    """

    def __init__(self, before: Snapshot, reached: Callable[[], States]) -> None:
        self.calls: dict[str, Called] = {}
        self._before, self._reached = before, reached
        self._thread = threading.get_ident()
        self._running: list[str] = []
        self._elsewhere = threading.local()
        self._lock = threading.RLock()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a thread other than the one that records."""
        return threading.get_ident() != self._thread

    @property
    def running(self) -> str | None:
        """The innermost module running in an island, as seen by this thread."""
        own = self._stack()
        return own[-1] if own else self._running[-1] if self._running else None

    def _stack(self) -> list[str]:
        if not self.is_elsewhere:
            return self._running
        if not hasattr(self._elsewhere, "running"):
            self._elsewhere.running = []
        running: list[str] = self._elsewhere.running
        return running

    def note(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call of a module by the running one, which may be the module itself (`super().forward`)."""
        parent = self.running
        with self._lock:
            if parent is not None and parent != path and path not in self.calls[parent].children:
                self.calls[parent].children.append(path)
            known = self.calls.get(path)
            reason, reached = _why_alone(module, (args, kwargs)), self._reached()
            if not reason and self._before.are_swapped(module):
                reason = AloneReason.OTHER_PARAMETERS
            if known is None:
                example: Arguments = ((), {}) if reason else copied_together((args, kwargs))
                chance = torch_state()
                self.calls[path] = Called(module, example, reason, chance=chance, reached=reached)
            elif not known.reason:
                same = alike(module, known.example, (args, kwargs)) and found_alike(known.reached, reached)
                known.reason = reason or ("" if same else AloneReason.VARIES)
                shows = share_memory(tensors_in(known.example)) or not share_memory(tensors_in((args, kwargs)))
                if not (known.reason or shows):  # what it may write is seen in another argument, which is to be known
                    known.example, known.output = copied_together((args, kwargs)), None
                    known.chance, known.autocast = torch_state(), Autocast.now()

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that an island starts; the calls of its earlier runs are forgotten."""
        with self._lock:
            if path not in self.calls:
                self.note(path, module, args, kwargs)
            self.calls[path].children = []

    @contextmanager
    def within(self, path: str) -> Iterator[None]:
        """Attribute calls of this thread to the module `path`."""
        stack = self._stack()
        stack.append(path)
        try:
            yield
        finally:
            stack.pop()

    def call(
        self, path: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a module's own forward, and note the call."""
        if path == self.running:
            return forward(*args, **kwargs)
        self.note(path, module, args, kwargs)
        with self.within(path):
            output = forward(*args, **kwargs)
        call = self.calls[path]
        if call.output is None and not call.reason and not is_leaf(module):
            call.output = copied(output)
        return output


def _why_alone(module: nn.Module, call: Arguments) -> str:
    """The reason that a graph cannot represent a module's call; '' where it can."""
    once, tensors = read_once(call), tensors_in(call)
    if once:
        return f"it is called with a {once}, which can be read once"
    if any(map(is_transformed, module.parameters())):
        return "a transform of torch.func calls it with other parameters"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "it is called where the forward takes gradients itself, which integers do not have"
    return foreign(tensors)
