"""Torch's autocast, which an island may set for the modules that it calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

KINDS = ("cpu", "cuda")
"""Of devices that an island's forward may set it for."""


@dataclass(frozen=True)
class Autocast:
    """Whether it is on, and the type that it computes in, for each of KINDS."""

    states: tuple[tuple[bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> Autocast:
        """As this thread has it."""
        return cls(tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in KINDS))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set it as it was, for the time of the context."""
        with ExitStack() as stack:
            for kind, (enabled, dtype), now in zip(KINDS, self.states, Autocast.now().states, strict=True):
                if now != (enabled, dtype):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield
