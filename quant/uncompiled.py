"""Children that `torch.compile` wraps: the copy of a model that is quantised has the compiled modules in their place.

A compiled child hides its calls in a function of its own, and a compiler would look through whatever capture puts on
the layers. What is quantised runs as it is written; the result can be compiled as a whole.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


class Uncompiled(nn.Module):
    """Replaces a compiled child under the same names, and calls the module that was compiled."""

    def __init__(self) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_orig_mod":
                raise
            return getattr(self._orig_mod, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with its hooks."""
        return self._orig_mod(*args, **kwargs)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is the result of `torch.compile(module)`."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # importing the compiler takes a second
    return frames is not None and isinstance(module, frames.OptimizedModule)


def stand_in_of(module: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """An `Uncompiled` for a compiled module, and the state of which it gets a copy."""
    stand_in = Uncompiled()
    own = {key: value for key, value in vars(module).items() if key in vars(stand_in)}
    return stand_in, {**own, "training": module.training}
